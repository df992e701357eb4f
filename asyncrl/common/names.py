"""The names of Ray actors. The names of a run's shared actors are unique in the run's Ray namespace, which is
`run.name`."""

COORDINATOR = "buffer"
"""The coordinator (`asyncrl.coordinator`). Views and metrics call its process the buffer."""
WEIGHTS = "weights"
"""The weight store (`asyncrl.weights.store`)."""
REPLICAS = "asyncrl-replicas"
"""The Ray namespace of the replicas of all runs, because a replica may go from one run to the next. Their names have
random parts."""
