"""The largest accepted difference between log-probs of the engine and of the learner."""

from asyncrl.config.schema import Config


def parity_tolerance_nats(config: Config) -> float:
    """Returns the limit for the difference of a token's log-prob (nats): the configured one, or a default by dtype."""
    configured = config.weights.parity_tolerance_nats
    if configured is not None:
        return configured
    return 1e-4 if config.model.dtype == "float32" else 5e-2
