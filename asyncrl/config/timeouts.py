"""Time limits that follow the size of the model, if the user has not set them.

The defaults in the schema are for models of up to 7 billion parameters in bfloat16. A larger model takes longer to
read and to send, and a healthy start would then end with an error. A number that the user sets always counts.
"""

import math

from asyncrl.config.schema import Config

TRANSFER_BYTES_PER_S = 0.25e9
"""Assumed speed of a weight update, from the learner into an engine: a fifth of a network of 10 Gbit/s, which several
replicas may share."""
READ_BYTES_PER_S = 0.2e9
"""Assumed speed at which a start reads the files of a model: a cold network disk. A local NVMe disk is ten times as
fast."""
START_S = 180.0
"""Assumed time of a start besides reading, seconds: imports from a cold disk, process groups, compilation."""
LONGEST_LOAD = 0.9
"""Longest derived `weights.load_timeout_s`, as a share of `run.stall_timeout_s`: a run whose replicas load for longer
than that ends as stalled."""


def derived_timeouts(config: Config, *, parameters: int | None) -> dict[str, float]:
    """Returns the limits that a model of so many parameters needs, seconds, by dotted key. Only keys that the user has
    not set, and whose default is too short, are in the result. It is empty if the size of the model is not known.

    >>> derived_timeouts(Config(), parameters=600_000_000)
    {}
    """
    nbytes = (parameters or 0) * (2 if config.model.dtype == "bfloat16" else 4)
    sent = 0 if config.model.lora is not None else nbytes  # the learner sends the adapter only, a few percent
    start_s = START_S + nbytes / READ_BYTES_PER_S
    limits = {
        "generator.startup_timeout_s": start_s,
        "generator.replace_timeout_s": start_s,  # a replica that is started again reads the same files
        "learner.startup_timeout_s": start_s,
        "weights.load_timeout_s": min(sent / TRANSFER_BYTES_PER_S, LONGEST_LOAD * config.run.stall_timeout_s),
    }
    found = {}
    for key, limit_s in limits.items():
        section, name = key.split(".")
        values = getattr(config, section)
        if name not in values.model_fields_set and limit_s > getattr(values, name):
            found[key] = float(math.ceil(limit_s))
    return found


def with_timeouts(config: Config, derived: dict[str, float]) -> Config:
    """Returns the configuration with the limits `derived`, the result of `derived_timeouts`. So each process of the run
    reads the same numbers."""
    for key, limit_s in derived.items():
        section, name = key.split(".")
        values = getattr(config, section).model_copy(update={name: limit_s})
        config = config.model_copy(update={section: values})
    return config
