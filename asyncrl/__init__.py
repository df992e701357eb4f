"""asyncrl: asynchronous reinforcement learning of language models on two pools with their own clocks.

Importing this package pulls in none of torch, ray, vllm.
"""

__version__ = "0.1.0"
