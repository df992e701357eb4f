"""Formats numbers, durations and times for people: in charts, in the report and in the live view."""

from datetime import UTC, datetime

from asyncrl.common.device_time import PoolCost
from asyncrl.learner.records import HeldoutEnds

_HELD_OUT = {
    "mean": "reward",
    "completion_tokens_mean": "tokens of a completion",
    "truncated_ratio": "share of truncated completions",
    "turns_mean": "turns of an episode",
}


def number(value: float) -> str:
    """Returns a number with three significant digits; thousands as k, millions as M, billions as G.

    >>> [number(value) for value in (0, 0.25, 12.5, 999.6, 1500, 2_000_000, 0.001, 7e-7)]
    ['0', '0.25', '12.5', '1k', '1.5k', '2M', '1e-3', '7e-7']
    """
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:  # 999.6 with three digits is 1000, so it is written as 1k
            return f"{value / size:.3g}{suffix}"
    if value != 0 and abs(value) <= 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Returns a duration as text: in seconds, in minutes and seconds, or in hours and minutes.

    >>> [duration(seconds) for seconds in (8.25, 59.97, 75, 7322)]
    ['8.2 s', '1 min 0 s', '1 min 15 s', '2 h 2 min']
    """
    if seconds < 59.95:  # from here on, one digit would round up to 60.0 s
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def moment(timestamp: str) -> str:
    """Returns an ISO 8601 time to the minute, in UTC. Text that is not such a time is returned unchanged.

    >>> moment("2026-11-20T16:38:09+00:00")
    '2026-11-20 16:38 UTC'
    >>> moment("yesterday")
    'yesterday'
    """
    try:
        return f"{datetime.fromisoformat(timestamp).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return timestamp


def change(first: float | None, last: float | None) -> str:
    """Returns the first and the last value of a reward as text. None means not known.

    >>> change(0.5, 0.75), change(0.5, None), change(None, None)
    ('0.50 → 0.75', '0.50 at the start', '–')
    """
    if first is None:
        return "–"
    return f"{first:.2f} at the start" if last is None else f"{first:.2f} → {last:.2f}"


def cost(spent: PoolCost) -> str:
    """Returns the device-seconds of a pool as text, with their lost parts.

    >>> from asyncrl.common.device_time import Device, Pool
    >>> parts = {"device_s": 2000.0, "starting_s": 100.0, "waiting_s": 500.0, "again_s": 0.0, "skipped_s": 0.0}
    >>> cost(PoolCost(pool=Pool.LEARNER, device=Device.GPU, per_token_s=0.02, **parts))
    '2k GPU-seconds, 0.02 for each trained token; 5% starts, 25% waiting'
    """
    lost = {
        "starts": spent.starting_s,
        "waiting": spent.waiting_s,
        "steps that were trained again": spent.again_s,
        "steps that were skipped": spent.skipped_s,
    }
    shares = [f"{part / spent.device_s:.0%} {what}" for what, part in lost.items() if spent.device_s > 0 and part > 0]
    each = "" if spent.per_token_s is None else f", {number(spent.per_token_s)} for each trained token"
    return f"{number(spent.device_s)} {spent.device.words}{each}" + (f"; {', '.join(shares)}" if shares else "")


def held_out(ends: HeldoutEnds) -> str:
    """Returns the rewards of the first and the last evaluation, each with the step of the evaluated weights.

    >>> held_out(HeldoutEnds(first=0.5, first_step=0)), held_out(HeldoutEnds())
    ('0.500 (step 0)', '–')
    >>> held_out(HeldoutEnds(first=0.5))  # an earlier version of asyncrl wrote summary.json
    '0.500'
    >>> held_out(HeldoutEnds(first=0.5, first_step=0, last=0.75, last_step=12))
    '0.500 (step 0) → 0.750 (step 12)'
    """
    known = [(ends.first, ends.first_step), (ends.last, ends.last_step)]
    texts = [
        f"{reward:.3f}" + ("" if step is None else f" (step {step})") for reward, step in known if reward is not None
    ]
    return " → ".join(texts) or "–"


def held_out_number(name: str) -> str:
    """Returns in words the name of a number of an evaluation (`EvalRecord.numbers`).

    >>> [held_out_number(name) for name in ("mean", "pass_at_8", "component_ends_well", "turns_mean")]
    ['reward', 'pass@8', 'component ends_well', 'turns of an episode']
    """
    if name.startswith("pass_at_"):
        return name.replace("_at_", "@")
    return _HELD_OUT.get(name) or name.replace("_", " ", 1)


def held_out_numbers(ends: HeldoutEnds) -> str:
    """Returns the numbers of the newest evaluation besides its reward as text; empty if none is known.

    >>> held_out_numbers(HeldoutEnds(first=0.5, first_step=4, numbers={"pass_at_2": 0.75, "turns_mean": 3}))
    'held out at step 4: pass@2 0.75, turns of an episode 3'
    """
    shown = ", ".join(f"{held_out_number(name)} {number(value)}" for name, value in ends.numbers.items())
    return f"held out at step {ends.newest_step}: {shown}" if shown else ""
