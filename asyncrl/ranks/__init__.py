"""The ranks of a sharded model: their processes, the calls to them, and a training step.

The policy and the critic share this code, which does not depend on the model.
"""
