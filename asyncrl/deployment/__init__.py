"""A run from outside: Ray, pools, the run's directory, what is shown of it."""
