"""A synchronous loop: engines that a driver calls, and refits of their weights by a policy (docs/own-loop.md)."""
