"""Weights on their way from learner to engines: manifests, transports, the gate, the parity probe."""
