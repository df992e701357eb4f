"""How far the engine's log-probs may be from the learner's."""

from asyncrl.config.schema import Config


def parity_tolerance_nats(config: Config) -> float:
    """Largest difference of a token's log-prob between engine and learner; by dtype unless the config says."""
    configured = config.weights.parity_tolerance_nats
    if configured is not None:
        return configured
    return 1e-4 if config.model.dtype == "float32" else 5e-2
