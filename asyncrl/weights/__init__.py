"""Weights on their way from learner to engines: manifests, transports, the gate that decides when to publish, and the
comparison of the engine's log-probs with the learner's."""
