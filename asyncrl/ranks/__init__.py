"""The ranks of a sharded model: their processes, the calls to them, and a step. It does not depend on the model."""
