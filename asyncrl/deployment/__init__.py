"""A run from outside: Ray, the pools, the run's directory; how they start and end."""
