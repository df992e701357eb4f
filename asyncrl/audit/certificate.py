"""The file `certificate.json`: what an audit checked and found, for a reader who has neither the run nor the docs of
asyncrl."""

import hashlib
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.audit.comparisons import Comparison
from asyncrl.audit.history import History, Outcome, Verdict
from asyncrl.deployment.run_dir import installed_version, processor, provenance
from asyncrl.learner.audit_records import AUDIT
from asyncrl.learner.records import known_info
from asyncrl.run_files import UNREADABLE, read

NAME = "certificate.json"
_SHOWN = (
    *("model.", "algorithm.", "learner.optimizer.", "staleness."),
    *(f"learner.{name}" for name in ("total_steps", "groups_per_step", "group_size", "updates_per_step", "ranks")),
    *("run.seed", "environment.name", "data.dataset", "data.path", "data.seed", "data.epochs"),
    *(f"generator.{name}" for name in ("temperature", "top_k", "top_p", "min_p", "logprobs", "max_completion_tokens")),
)
"""Settings that say what was trained and how: the beginnings of their dotted keys. Options of an environment and
addresses are not among them, because they may be private."""
_WORDS = {
    "step": "one step of training; the first one is step 0",
    "group, sample": (
        "a group has a prompt and all samples (completions) of it; both count from 0. A batch has a row for each sample"
    ),
    "log-prob, nats": "the natural logarithm of the probability of a token, and its unit",
    "version": "the weights after so many steps; a token is as many versions old as steps came between",
    "generator, learner": "the processes that sample with the model, and those that train it",
    "issued, open, fate": (
        "a prompt is issued when a generator gets it; its fate says how that ended, for example `trained` or `failed`, "
        "and without one it is open. Each issue has a group of its own: the same prompt can be issued again in a later "
        "pass over the data"
    ),
    "ledger": "the counts of issued groups, samples and tokens by their fates, after each step",
    "lost": "made by steps that a restart trained again from a checkpoint; they do not count",
    "incarnation": "one start of the learner; a run that was restarted has several",
    "ancestor": "a version from which the weights of a step were made, in runs that went back to a checkpoint",
    "publication": "weights that were sent to the generators",
    "kept": "stored in the run's directory, because of the setting audit.keep_weights",
    "filter": "a setting that leaves samples out of training, for example those that were cut at the length limit",
    "plain": (
        "computed by a second, simple path: torch and transformers, the whole model, one sample at a time. Check 6 is "
        "named after it, the witness"
    ),
    "verdict": (
        "`passed`: no difference is above the accepted one; `failed`: at least one is; `not possible`: the check could "
        "not run, and says why. A comparison without values has `nothing to compare`. This is no failure, but verifies "
        "nothing. `result` at the top names every check that failed or was not possible"
    ),
    "git": "the commit of asyncrl's source; `-dirty` means that files had changes that no commit has",
}
_NOT_CHECKED = (
    "whether the reward measures what is wanted, and the rewards of samples that check 6 did not score again",
    "the direction of a gradient, except through the new weights: otherwise its norm is compared",
    "the optimizer in steps whose new weights were not computed, and all numbers of steps that check 6 did not choose",
    "rewards of held-out evaluations: only that each prompt has an answer, and that greedy answers are greedy",
    "that the prompts are those of the data, word by word",
    "files that were forged on purpose: the same program, asyncrl, wrote them and reads them",
)
_OF_CHECKS = {
    "1": "that each prompt was trained once, or its record says why not; no difference is accepted",
    "2": (
        "that after each step as many samples and tokens have a fate as were issued, and each held-out prompt an "
        "answer or a failure; no difference is accepted. And that the run's own witness found no fault while it trained"
    ),
    "3": "that no trained token is of lost weights, or older than staleness.max_versions; no difference is accepted",
    "4": (
        "digests: each step began with the weights that the step before it made, and kept weights and checkpoints have "
        "those of their versions; no difference is accepted"
    ),
    "5": (
        "each step again by the same code: its loss, gradient norm and weights, bit by bit. And the sampling log-prob "
        "of each token again by the learner's code, under the weights of the token's version; the difference may be as "
        "large as the setting in brackets"
    ),
    "6": "some steps by a second, plain path; its comparisons are below",
}


def certificate_path(history: History) -> Path:
    """Returns the path of the certificate of a run, for users who name no other path."""
    return history.directory / AUDIT / NAME


def certificate(history: History, outcomes: Sequence[Outcome]) -> bytes:
    """Returns the certificate of an audit's outcomes, as JSON. It has no secret: the configuration has none, and only
    some of its settings are shown."""
    found = {
        "what_this_file_is": (
            "The result of `asyncrl audit`: checks of the files that a training run has written. Each check says what "
            "it compared, and the largest difference that it found. It finds errors; it proves nothing about files "
            "that were forged on purpose."
        ),
        "words": _WORDS,
        "result": _result(outcomes),
        "not_checked": _NOT_CHECKED,
        "how_to_repeat_it": _command(history, outcomes),
        "run": _run(history),
        "audited": {
            "date_and_time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions_of_packages": {"asyncrl": installed_version("asyncrl"), **provenance()},
            "processor": processor(),
        },
        "configuration_of_the_run": {
            "sha256_of_config_yaml": _sha256_of_config(history.directory),
            "settings_that_say_what_was_trained": {
                key: value for key, value in sorted(history.settings.items()) if key.startswith(_SHOWN)
            },
        },
        "digests": _digests(history),
        "checks": [
            {
                "check": each.name,
                "what_it_compares": _OF_CHECKS[each.name[0]],
                "verdict": str(each.verdict),
                "what_was_found": each.detail,
            }
            for each in outcomes
        ],
        "second_plain_computation_of_training_steps": _second_computation(outcomes),
    }
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"


def _result(outcomes: Sequence[Outcome]) -> str:
    failed = [each.name for each in outcomes if each.verdict is Verdict.FAILED]
    impossible = [each.name for each in outcomes if each.verdict is Verdict.NOT_POSSIBLE]
    if failed:
        return f"failed: {', '.join(failed)}"
    return f"passed; not possible: {', '.join(impossible)}" if impossible else "passed"


def _command(history: History, outcomes: Sequence[Outcome]) -> str:
    steps = max((len(each.witnessed.steps) for each in outcomes if each.witnessed is not None), default=0)
    asked = f" --witness-steps {steps}" if steps else ""
    return (
        f"asyncrl audit {history.directory.name}{asked}, with the run's directory on any machine. Check 5 needs the "
        "same model of processor and the same versions of packages"
    )


def _run(history: History) -> dict[str, Any]:
    info, first = known_info(history.directory), history.began[min(history.began)] if history.began else None
    return {
        "name": history.directory.name if info is None else info.name,
        "began_utc": None if info is None else info.started,
        "ended_utc": None if info is None else info.finished,
        "state": None if info is None else info.state,
        "began_with_the_weights_of": (
            "the model at model.path" if history.forked_from is None else f"{history.forked_from}, which is another run"
        ),
        "training_steps": len(history.steps),
        "training_steps_lost_in_restarts": len(history.lost),
        "trained_samples": sum(len(group.samples) for step in history.steps for group in step.groups),
        "trained_tokens": sum(sum(step.token_staleness) for step in history.steps),
        "versions_of_packages": None if first is None else first.machine.packages,
        "processor": None if first is None else first.machine.processor,
        "number_of_processes_that_trained": None if first is None else first.machine.ranks,
    }


def _sha256_of_config(directory: Path) -> str | None:
    try:
        return hashlib.sha256(read(directory / "config.yaml")).hexdigest()
    except UNREADABLE:
        return None


def _digests(history: History) -> dict[str, Any]:
    if not history.steps:
        return {}
    first, last, samples = history.steps[0], history.steps[-1], hashlib.sha256()
    for step in history.steps:
        for group in step.groups:
            for sample in group.samples:
                samples.update(sample.row.to_bytes(8, sys.byteorder))
    return {
        f"weights_before_the_first_step_{first.digest_kind}_64": f"{first.before:016x}",
        f"weights_after_the_last_step_{last.digest_kind}_64": f"{last.after:016x}",
        "all_trained_samples_in_order_sha256": samples.hexdigest(),
    }


def _second_computation(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    witnessed = next((each.witnessed for each in outcomes if each.witnessed is not None), None)
    what = (
        "Some training steps were computed a second time from the stored samples and weights, by a plain path: "
        "the whole model, each sample alone, formulas in 64-bit floats. It uses no code by which training computed log-"
        "probs, advantages, loss, gradient or new weights, except an optimizer of the user's own. It shares the "
        "code that reads configuration and files, and rewards are scored by the code of the run."
    )
    if witnessed is None:
        return {"what_this_is": what, "training_steps_computed": [], "why_none": _why_none(outcomes)}
    return {
        "what_this_is": what,
        "training_steps_of_the_run": witnessed.trained_steps,
        "training_steps_computed": witnessed.steps,
        "how_they_were_chosen": (
            "`asyncrl audit RUN --witness-steps K` takes half of K steps from the start of the run, and spreads the "
            "others evenly up to the last one. A larger K computes more. The optimizer's state is known only as "
            "long as no step was left out, so new weights are computed only for the steps from the start of the run"
        ),
        "training_steps_of_which_the_new_weights_were_computed": witnessed.optimizer_steps,
        "comparisons": [_comparison(each) for each in witnessed.comparisons],
        "not_computed": [*witnessed.left_out, "the value of the loss: the norm of its gradient is compared"],
    }


def _why_none(outcomes: Sequence[Outcome]) -> str:
    of_witness = [each.detail for each in outcomes if each.name.startswith("6")]
    return of_witness[0] if of_witness else "the audit was not asked for it (`asyncrl audit RUN --witness-steps 5`)"


def _comparison(found: Comparison) -> dict[str, Any]:
    if not found.number:
        return {
            "check": found.check,
            "what_is_compared": found.compares,
            "verdict": f"nothing to compare: {found.nothing}" if found.nothing else "nothing to compare",
        }
    return {
        "check": found.check,
        "what_is_compared": found.compares,
        "verdict": "failed" if found.failed else "passed",
        "number_of_compared_values": found.number,
        "compared_values": found.things,
        "largest_difference": found.worst,
        "largest_accepted_difference": found.limit,
        "unit_of_the_difference": found.unit,
        "where_the_largest_difference_is": found.where if found.worst else None,
    }
