"""The roles of a run's deployments, and the states of a run."""

from enum import StrEnum


class Role(StrEnum):
    """The kind of a deployment."""

    LEARNER = "learner"
    GENERATOR = "generator"


class RunState(StrEnum):
    """The state of the whole run."""

    STARTING = "starting"
    RUNNING = "running"
    CLOSING = "closing"
    FINISHED = "finished"
    STOPPED = "stopped"
    """The run was ended before its last step, by a person (Ctrl-C, `asyncrl down`, a closed terminal) or by an error of
    a callback."""
    PREEMPTED = "preempted"
    """The run was ended from outside before its last step, by SIGTERM: the same command shall continue it."""
    FAILED = "failed"


TRAINING = "training"
"""The phase of a learner that trains. Its other phases are free text."""
