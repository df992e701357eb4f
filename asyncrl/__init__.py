"""asyncrl: asynchronous reinforcement learning of language models.

A pool of generators and a pool of learners run at the same time, each at its own speed. Importing this package does not
import torch, ray or vllm.
"""

__version__ = "0.1.0"
