"""The names of a run's shared Ray actors. Each name is unique in the run's Ray namespace, which is `run.name`."""

COORDINATOR = "buffer"
"""The coordinator (`asyncrl.coordinator`). Views and metrics call its process the buffer."""
WEIGHTS = "weights"
"""The weight store (`asyncrl.weights.store`)."""
