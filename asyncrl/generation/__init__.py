"""vLLM engines, the replicas that roll out groups, and their weight updates."""
