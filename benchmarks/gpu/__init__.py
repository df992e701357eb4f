"""What one GPU can show of asyncrl without vLLM and Ray. `measure.py` is the command, and each other file a part."""
