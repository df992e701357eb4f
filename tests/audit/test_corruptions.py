"""Each planted corruption is found, by the check that should find it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from audited_run import STATE, changed, record, record_killed_run
from typer.testing import CliRunner

from asyncrl.audit.audit import audit
from asyncrl.audit.history import Outcome, Verdict
from asyncrl.buffer.ledger import Amount, Fate
from asyncrl.buffer.records import VersionSpan
from asyncrl.checkpoints.directory import MANIFEST, FileEntry, RunManifest
from asyncrl.cli.main import app
from asyncrl.common.version import Version
from asyncrl.learner.audit_records import TrainedGroup, TrainedStep
from asyncrl.learner.records import EvalRecord
from asyncrl.learner.saving import KeptSteps
from asyncrl.ranks.digest import MULTILINEAR, XXH3


def step_of(records: list[Any], number: int) -> int:
    """Returns the place of a step's record."""
    return next(i for i, each in enumerate(records) if isinstance(each, TrainedStep) and each.step == number)


def edit_group(change: Callable[[TrainedGroup], TrainedGroup]) -> Callable[[Path], None]:
    """Returns a corruption of the first group of step 4."""

    def edit(records: list[Any]) -> None:
        place = step_of(records, 4)
        first, *others = records[place].groups
        records[place] = msgspec.structs.replace(records[place], groups=(change(first), *others))

    return lambda directory: changed(directory, 2, edit)


def edit_sample(**fields: Any) -> Callable[[Path], None]:
    def edit(group: TrainedGroup) -> TrainedGroup:
        *others, last = group.samples
        return msgspec.structs.replace(group, samples=(*others, msgspec.structs.replace(last, **fields)))

    return edit_group(edit)


def age_sample(directory: Path) -> None:
    """The ranks trained two tokens of version 1.1 at step 4, and the buffer let them."""
    edit_sample(spans=(VersionSpan(1, 1, 2),))(directory)

    def edit(records: list[Any]) -> None:
        place = step_of(records, 4)
        [six] = records[place].token_staleness
        records[place] = msgspec.structs.replace(records[place], token_staleness=(six - 2, 0, 0, 2))

    changed(directory, 2, edit)


def publish_otherwise(directory: Path) -> None:
    """Version 2.2 was published with another content than 1.2, from which it began."""

    def edit(records: list[Any]) -> None:
        assert records[0].version == Version(2, 2)
        records[0] = msgspec.structs.replace(records[0], digest="0")

    changed(directory, 2, edit)


def repeat_sample(directory: Path) -> None:
    edit_group(lambda group: msgspec.structs.replace(group, samples=(*group.samples, group.samples[-1])))(directory)


def repeat_group(directory: Path) -> None:
    """Step 4 trains a group of step 3 again, in place of its own first one."""

    def edit(records: list[Any]) -> None:
        before, place = records[step_of(records, 3)], step_of(records, 4)
        groups = (before.groups[0], *records[place].groups[1:])
        records[place] = msgspec.structs.replace(records[place], groups=groups)

    changed(directory, 2, edit)


def repeat_prompt(directory: Path) -> None:
    """Steps 3 and 4 train one prompt three times, and the data have no prompt so often."""

    def edit(records: list[Any]) -> None:
        for number in (3, 4):
            place = step_of(records, number)
            groups = tuple(msgspec.structs.replace(group, prompt=7) for group in records[place].groups)
            records[place] = msgspec.structs.replace(records[place], groups=groups)

    changed(directory, 2, edit)


def drop_group(directory: Path) -> None:
    """Neither the learner nor the buffer recorded the group."""

    def edit(records: list[Any]) -> None:
        place = step_of(records, 4)
        step = records[place]
        gone, *groups = step.groups
        ended = tuple(each for each in step.ledger.ended if each.group != gone.group)
        ledger = msgspec.structs.replace(step.ledger, ended=ended)
        records[place] = msgspec.structs.replace(step, groups=tuple(groups), ledger=ledger)

    changed(directory, 2, edit)


def swap_steps(directory: Path) -> None:
    def edit(records: list[Any]) -> None:
        one, other = step_of(records, 3), step_of(records, 4)
        records[one], records[other] = records[other], records[one]

    changed(directory, 2, edit)


def edit_ledger(directory: Path) -> None:
    """One token more was issued and trained."""

    def edit(records: list[Any]) -> None:
        place = step_of(records, 4)
        ledger, more = records[place].ledger, Amount(0, 0, 1)
        fates = ledger.fates | {Fate.TRAINED: ledger.fates[Fate.TRAINED] + more}
        ledger = msgspec.structs.replace(ledger, fates=fates, issued=ledger.issued + more)
        records[place] = msgspec.structs.replace(records[place], ledger=ledger)

    changed(directory, 2, edit)


def swap_checkpoints(directory: Path) -> None:
    one, other = directory / "checkpoints" / "step-2", directory / "checkpoints" / "step-4"
    aside = one.rename(one.with_name("aside"))
    other.rename(one)
    aside.rename(other)


def flip_last_byte(name: str, *, manifest: bool) -> Callable[[Path], None]:
    """Returns a corruption of a file in the checkpoint of step 4. With `manifest`, the checkpoint's manifest agrees."""

    def flip(directory: Path) -> None:
        checkpoint = directory / "checkpoints" / "step-4"
        path = min(checkpoint.glob(name))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        if manifest:
            old = msgspec.json.decode((checkpoint / MANIFEST).read_bytes(), type=RunManifest)
            entry = FileEntry(nbytes=len(data), xxh3=xxhash.xxh3_128_hexdigest(data))
            files = old.files | {str(path.relative_to(checkpoint)): entry}
            new = msgspec.json.encode(msgspec.structs.replace(old, files=files))
            (checkpoint / MANIFEST).write_bytes(msgspec.json.format(new, indent=2))

    return flip


WEIGHTS = f"policy/weights/{STATE}"


def edit_batch(column: str, change: Callable[[torch.Tensor], None]) -> Callable[[Path], None]:
    """Returns a corruption of the kept batch of step 4."""

    def edit(directory: Path) -> None:
        kept = KeptSteps(directory)
        batch = kept.batch(Version(2, 4))
        assert batch is not None
        lease, rows = batch
        change(rows[column])
        kept.write_batch(lease, rows)

    return edit


def flip_kept_weight(directory: Path) -> None:
    path = KeptSteps(directory).weights_path(Version(2, 4)) / STATE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


OTHER_ROW = "in the kept batch of step 4 has other tokens, log-probs or versions"
CORRUPTIONS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a version that is too old": (
        age_sample, "3", "version 1.1, which was 3 versions old",
    ),
    "a version that is dead": (edit_sample(spans=(VersionSpan(1, 3, 2),)), "3", "version 1.3, which is lost"),
    "a version that is one off": (edit_sample(spans=(VersionSpan(2, 3, 2),)), "3", "but the ranks trained"),
    "a reward": (edit_sample(reward=0.75), "2", "has reward_mean"),
    "a weight byte": (flip_last_byte(WEIGHTS, manifest=False), "4", "the manifest says"),
    "other weights": (flip_last_byte(WEIGHTS, manifest=True), "4", "has weights with the digest"),
    "a token": (edit_batch("input_ids", lambda ids: ids[-1, 3].add_(1)), "5", OTHER_ROW),
    "a log-prob": (edit_batch("generation_logprobs", lambda found: found[-1, 3].sub_(1e-6)), "5", OTHER_ROW),
    "a kept weight byte": (flip_kept_weight, "4", "audit/weights/2.4 has the digest"),
    "a published byte": (publish_otherwise, "4", "versions 1.2 and 2.2 have equal weights, but were published"),
    "a repeated sample": (repeat_sample, "1", "3 samples of group"),
    "a repeated group": (repeat_group, "1", "has two fates: trained by step 3, and trained by step 4"),
    "a repeated prompt": (repeat_prompt, "1", "epoch 0 trained 1 prompts 2 times or more, but the data have 0 prompts"),
    "a part of a mixture": (edit_group(lambda group: msgspec.structs.replace(group, part="b")), "1", "of the part 'b'"),
    "a dropped group": (drop_group, "1", "has no fate"),
    "a swapped checkpoint": (swap_checkpoints, "4", "is a checkpoint of version 2.4, not of step 2"),
    "a reordered step": (swap_steps, "4", "the record of step 4 stands where step 3 is expected"),
    "an edited ledger": (edit_ledger, "2", "the groups with this fate add up to"),
}  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("name", CORRUPTIONS)
async def test_a_corruption_is_found_by_its_check(name: str, tmp_path: Path) -> None:
    directory = await record_killed_run(tmp_path, keep_weights=True)
    corrupt, check, words = CORRUPTIONS[name]
    corrupt(directory)
    found = {outcome.name[0]: outcome for outcome in audit(directory)}
    assert found[check].verdict is Verdict.FAILED, "\n".join(map(str, found.values()))
    assert words in found[check].detail


def edit_first_step_of_second_start(**fields: Any) -> Callable[[Path], None]:
    def edit(records: list[Any]) -> None:
        place = step_of(records, 2)
        records[place] = msgspec.structs.replace(records[place], **fields)

    return lambda directory: changed(directory, 2, edit)


OF_OTHER_DEVICE: dict[str, tuple[Callable[[Path], None], str]] = {
    "another start": (
        edit_first_step_of_second_start(before_by_kind={XXH3: 7}), "step 2 started from weights with the digest 0000",
    ),
    "no common kind": (edit_first_step_of_second_start(before_by_kind={}), "so nothing shows from which weights"),
    "a published byte": CORRUPTIONS["a published byte"][::2],
    "other weights": CORRUPTIONS["other weights"][::2],
    "a kept weight byte": CORRUPTIONS["a kept weight byte"][::2],
}  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("name", OF_OTHER_DEVICE)
async def test_a_corruption_of_a_run_that_was_resumed_on_another_kind_of_device_is_found(
    name: str, tmp_path: Path
) -> None:
    directory = await record_killed_run(tmp_path, keep_weights=True, kinds=(XXH3, MULTILINEAR))
    corrupt, words = OF_OTHER_DEVICE[name]
    corrupt(directory)
    weights = next(outcome for outcome in audit(directory) if outcome.name == "4 weights")
    assert weights.verdict is Verdict.FAILED
    assert words in weights.detail


@pytest.mark.asyncio
async def test_another_row_in_a_checkpoint_than_was_trained_is_found(tmp_path: Path) -> None:
    directory = await record(tmp_path, max_staleness=2)
    assert Verdict.FAILED not in {outcome.verdict for outcome in audit(directory)}
    flip_last_byte("rows/*.safetensors", manifest=True)(directory)
    weights = next(outcome for outcome in audit(directory) if outcome.name == "4 weights")
    assert weights.verdict is Verdict.FAILED
    assert "has other rows of group" in weights.detail


@pytest.mark.asyncio
async def test_an_evaluation_that_leaves_prompts_out_is_found(tmp_path: Path) -> None:
    directory = await record(tmp_path)
    evals = directory / "evals.jsonl"

    def ledger() -> Outcome:
        return next(outcome for outcome in audit(directory) if outcome.name == "2 ledger")

    whole = EvalRecord(version=0, wall_s=1, asked=8, prompts=6, failed=2, reward_mean=0.5)
    of_before = msgspec.structs.replace(whole, asked=None, prompts=5)
    evals.write_bytes(msgspec.json.encode(whole) + b"\n" + msgspec.json.encode(of_before) + b"\n")
    assert ledger().verdict is Verdict.PASSED
    assert "; 1 evaluations have an answer or a failure of each prompt, 0 are greedy" in ledger().detail
    evals.write_bytes(msgspec.json.encode(msgspec.structs.replace(whole, prompts=5)) + b"\n")
    assert ledger().verdict is Verdict.FAILED
    words = "the evaluation heldout of step 0 asked 8 prompts, but it has 5 with a reward and 2 that failed"
    assert words in ledger().detail
    evals.write_bytes(b"{\n{\n")
    assert ledger().verdict is Verdict.FAILED


@pytest.mark.asyncio
@pytest.mark.parametrize(("ratio", "verdict"), [(1.0, Verdict.PASSED), (2.0, Verdict.FAILED)])
async def test_what_the_witness_of_the_run_has_found_fails_the_audit(
    tmp_path: Path, ratio: float, verdict: Verdict
) -> None:
    directory = await record(tmp_path)
    path = directory / "steps.jsonl"
    first, *others = path.read_bytes().splitlines(keepends=True)
    line = msgspec.json.decode(first)
    line["diagnostics"]["witness_counts_ratio"] = ratio
    path.write_bytes(b"".join([msgspec.json.encode(line) + b"\n", *others]))

    def without_checksums(records: list[Any]) -> None:
        records[:] = [
            msgspec.structs.replace(each, line=None) if isinstance(each, TrainedStep) else each for each in records
        ]

    changed(directory, 1, without_checksums)
    outcome = next(each for each in audit(directory) if each.name == "2 ledger")
    assert outcome.verdict is verdict, outcome.detail
    if verdict is Verdict.FAILED:
        assert "trained step 0, the witness found 2 times the difference that it accepts" in outcome.detail


@pytest.mark.asyncio
async def test_a_sixth_check_that_was_asked_for_and_is_not_possible_has_an_exit_code(tmp_path: Path) -> None:
    directory = await record(tmp_path)
    assert CliRunner().invoke(app, ["audit", str(directory)]).exit_code == 0
    done = CliRunner().invoke(app, ["audit", str(directory), "--witness-steps", "2"])
    assert "not possible: 6 witness" in done.stdout
    assert done.exit_code == 1


@pytest.mark.asyncio
async def test_an_evaluation_that_is_not_greedy_is_found(tmp_path: Path) -> None:
    directory = await record(tmp_path)
    own = EvalRecord(version=3, wall_s=1, asked=8, prompts=8, reward_mean=0.5, non_greedy_tokens=0)
    several = msgspec.structs.replace(own, samples=4, non_greedy_tokens=None)
    for line, verdict, words in (
        (own, Verdict.PASSED, "; 2 evaluations have an answer or a failure of each prompt, 1 are greedy"),
        (
            msgspec.structs.replace(own, non_greedy_tokens=7),
            Verdict.FAILED,
            "the evaluation heldout of step 3 is not greedy, although it has one completion of a prompt: 7 tokens",
        ),
    ):
        lines = [msgspec.json.encode(each) + b"\n" for each in (several, line)]
        (directory / "evals.jsonl").write_bytes(b"".join(lines))
        ledger = next(outcome for outcome in audit(directory) if outcome.name == "2 ledger")
        assert (ledger.verdict, words in ledger.detail) == (verdict, True), ledger.detail
