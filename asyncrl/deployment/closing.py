"""The time that a run needs to end when a signal asks it to."""

import math

LEAVE_S = 10.0
"""Part of `run.shutdown_grace_s` that stays reserved for the last actions of a run, after its waits have ended: the end
of engines, ranks and Ray. 10 s were measured for the quickstart on 2 cores."""


def short_grace(grace_s: float, *, step_s: float, save_s: float | None) -> str | None:
    """Returns a warning if a run that is asked to end needs longer than its grace, else None.

    `step_s` is the duration of the last step, and `save_s` that of the saves to come; None if it is not known.

    >>> short_grace(20, step_s=6.0, save_s=3.0)
    >>> (short_grace(20, step_s=6.0, save_s=30.0) or "").partition(", but")[0]
    'the run needs about 46 s to end: 6 s for its step, 30 s for its checkpoint and 10 s to close'
    """
    needed_s = step_s + (save_s or 0.0) + LEAVE_S
    if needed_s <= grace_s:
        return None
    save = "an unknown time for its checkpoint" if save_s is None else f"{save_s:.0f} s for its checkpoint"
    return (
        f"the run needs about {needed_s:.0f} s to end: {step_s:.0f} s for its step, {save} and {LEAVE_S:.0f} s to "
        f"close, but run.shutdown_grace_s = {grace_s:g} s. If it is killed before, the steps since its newest "
        "checkpoint are lost, and a resumed run trains them again. Set run.shutdown_grace_s to "
        f"{math.ceil(needed_s)} or more, and "
        "give the process this time (Docker: stop_grace_period, Kubernetes: terminationGracePeriodSeconds, Slurm: "
        "KillWait)"
    )
