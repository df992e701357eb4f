"""Trains a tiny chat model on games of several turns, and checks every row that was trained.

    python benchmarks/agents.py guess_the_number     # some minutes on two cores, with its audit
    python benchmarks/agents.py calculator
    python benchmarks/agents.py key_value_store
    python benchmarks/agents.py --write              # writes the table of all into docs/agents.md

The runs are those of configs/agents/. They keep the rows of every step, so that each of these can be checked: every
sampled turn is trained with the token that ends it, nothing else is trained, and the messages between the turns are
those of the game, in the chat template. `asyncrl audit` scores every trained token of every turn under the weights that
sampled it, in the whole episode, and checks the ledger and the bound of staleness.
"""

import argparse
import json
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from chat_models import command
from report_page import REPOSITORY, busy_percent, provenance, write_section

from asyncrl.config.load import load_config
from asyncrl.learner.records import StepRecord, read_lines

NAME = "agents.py"
RESULTS = Path(__file__).with_suffix(".jsonl")
GAMES = {
    "guess_the_number": r"<\|im_start\|>user\n(Guess 1-9|higher|lower|no number)<\|im_end\|>\n"
    r"<\|im_start\|>assistant\n",
    "key_value_store": r"<\|im_start\|>system\nTools:.*<\|im_end\|>\n<\|im_start\|>user\n"
    r"([a-h] is \d+\.|What is [a-h]\?)<\|im_end\|>\n<\|im_start\|>assistant\n|<\|im_start\|>user\n<tool_response>.*"
    r"</tool_response><\|im_end\|>\n<\|im_start\|>assistant\n",
    "calculator": r"(<\|im_start\|>system\nTools:.*<\|im_end\|>\n)?<\|im_start\|>user\n(What is .*\?|<tool_response>.*"
    r"</tool_response>)<\|im_end\|>\n<\|im_start\|>assistant\n",
}
"""What the model reads before each of its turns."""
NEEDED_RISE = 0.3
COMMAND_TIMEOUT_S = 900


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A run of one game. `turns` are the mean turns of an episode in the first and in the last five steps, `updates`
    the weight updates within episodes, and `replay` is what the audit says about the trained tokens."""

    game: str
    provenance: str
    steps: int
    seconds: float
    reward: tuple[float, float]
    heldout: tuple[float, float]
    turns: tuple[float, float]
    updates: int
    rows: int
    read_tokens: int
    sampled_tokens: int
    parity_nats: float
    replay: str

    @property
    def rise(self) -> float:
        return self.heldout[1] - self.heldout[0]


def checked_rows(run: Path, *, model: Path, game: str) -> tuple[Counter[str], list[float]]:
    """Checks the rows of every step of a run. Returns the number of rows and tokens by kind, and the mean turns of each
    step. Raises AssertionError with the row's text for one that is not as the text at the top of this file says."""
    from asyncrl.data.specs import BRANCH, extra_fields
    from asyncrl.data.tokenizer import load_tokenizer
    from asyncrl.learner.saving import KeptSteps

    tokenizer = load_tokenizer(str(model))
    found: Counter[str] = Counter()
    turns = []
    kept = KeptSteps(run)
    for version in kept.versions():
        batch = kept.batch(version)
        if batch is None:
            continue  # no step began with the last version
        lease, rows = batch
        found["updates"] += sum(group.meta.mid_sequence_updates for group in lease.groups)
        rewards = [reward for group in lease.groups for reward in group.meta.rewards]
        of_step = 0
        for row, length in enumerate(rows["input_lengths"].tolist()):
            if rewards[row] is None:
                continue  # the sample failed and is not trained; its row may be empty
            names = ("input_ids", "token_mask", *extra_fields(rows))
            columns = {name: rows[name][row, :length].tolist() for name in names}
            branches = columns.get(BRANCH, [0] * length)
            tokens_of_row = zip(branches, columns["input_ids"], columns["token_mask"], strict=True)
            for _, tokens in groupby(tokens_of_row, lambda each: each[0]):
                of_step += _checked_branch([each[1:] for each in tokens], tokenizer, game=game, found=found)
            found["rows"] += 1
        turns.append(of_step / max(1, len(rewards) - rewards.count(None)))
    return found, turns


def _checked_branch(tokens_of_branch: Sequence[Any], tokenizer: Any, *, game: str, found: Counter[str]) -> int:
    """Checks the tokens of a branch, pairs of the token and its mask, and counts them in `found`. Returns the number of
    its trained turns."""
    end = tokenizer.eos_token_id
    parts = [
        (trained, [token for token, _ in part]) for trained, part in groupby(tokens_of_branch, lambda each: each[1])
    ]
    text = tokenizer.decode([token for token, _ in tokens_of_branch])
    assert not parts[0][0], f"the branch begins with a trained token: {text}"
    assert parts[-1][0], f"the branch ends with a token that is not trained: {text}"
    for number, (trained, tokens) in enumerate(parts):
        if trained:
            assert end not in tokens[:-1], f"tokens after the end of a turn: {text}"
            found["sampled"] += len(tokens)
            continue
        cut_off = number > 0 and parts[number - 1][1][-1] != end
        assert (tokens[0] == end) == cut_off, f"a turn that was cut off is not closed once: {text}"
        read = tokenizer.decode(tokens[cut_off:]).removeprefix("\n")
        assert re.fullmatch(GAMES[game], read, re.DOTALL), f"not a message of the game, {read!r}: {text}"
        found["read"] += len(tokens)
    return sum(trained > 0 for trained, _ in parts)


def measure(game: str, *, overrides: Sequence[str], folder: Path) -> Result:
    """Trains on a game, and checks the rows and the tokens."""
    busy = busy_percent()
    recipe = REPOSITORY / "configs" / "agents" / f"{game}.yaml"
    model = folder / "model"
    settings = [f"run.dir={folder / 'runs'}", f"model.path={model}", "model.tiny.chat=true", *overrides]
    command("model", "-c", str(recipe), *settings, timeout_s=COMMAND_TIMEOUT_S)
    command(
        *("up", "-c", str(recipe), *settings, "audit.keep_weights=all", "checkpoint.every_steps=0"),
        timeout_s=COMMAND_TIMEOUT_S,
    )
    run = folder / "runs" / load_config([recipe], settings).run.name
    audited = command("audit", str(run), timeout_s=COMMAND_TIMEOUT_S)
    summary = json.loads((run / "summary.json").read_bytes())
    assert summary["ledger_closed"]
    rows, turns = checked_rows(run, model=model, game=game)
    replay = re.search(r"\d+ tokens were scored again.*? nats", audited)
    assert replay is not None, audited
    steps = read_lines(run / "steps.jsonl", StepRecord)
    rewards = [step.reward_mean for step in steps if step.reward_mean is not None]
    return Result(
        game=game,
        provenance=provenance(f"benchmarks/{NAME}", busy_percent=busy),
        steps=summary["steps"],
        seconds=summary["wall_s"],
        reward=(_mean(rewards[:5]), _mean(rewards[-5:])),
        heldout=(summary["heldout_first"], summary["heldout_last"]),
        turns=(_mean(turns[:5]), _mean(turns[-5:])),
        updates=rows["updates"],
        rows=rows["rows"],
        read_tokens=rows["read"],
        sampled_tokens=rows["sampled"],
        parity_nats=summary["parity_max_nats"],
        replay=replay[0],
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def results() -> dict[str, Result]:
    """Returns the newest result of each game."""
    lines = RESULTS.read_bytes().splitlines() if RESULTS.exists() else []
    return {result.game: result for result in (msgspec.json.decode(line, type=Result) for line in lines)}


def table(found: Sequence[Result]) -> list[str]:
    """Returns the lines of the section in docs/agents.md."""
    heads = (
        "game", "steps, s", "held-out", "reward of five steps", "turns of an episode", "rows", "tokens read, mask 0",
        "tokens sampled, mask 1", "weight updates within episodes", "parity, nats", "scored again",
    )  # fmt: skip
    lines = [*(result.provenance for result in found), ""]
    lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for one in found:
        cells = (
            one.game,
            f"{one.steps}, {one.seconds:.0f}",
            f"{one.heldout[0]:.3f} → {one.heldout[1]:.3f} (+{one.rise:.3f})",
            f"{one.reward[0]:.3f} → {one.reward[1]:.3f}",
            f"{one.turns[0]:.2f} → {one.turns[1]:.2f}",
            f"{one.rows:,}",
            f"{one.read_tokens:,}",
            f"{one.sampled_tokens:,}",
            f"{one.updates:,}",
            f"{one.parity_nats:.1e}",
            one.replay,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("games", nargs="*", help=f"games to run: {', '.join(GAMES)}")
    parser.add_argument(
        "--set", nargs="*", default=[], help="overrides of the configuration, e.g. learner.total_steps=9"
    )
    parser.add_argument("--write", action="store_true", help="write the results into docs/agents.md")
    arguments = parser.parse_args()
    if unknown := set(arguments.games) - set(GAMES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; the games are {', '.join(GAMES)}")
    for game in arguments.games:
        with tempfile.TemporaryDirectory() as temporary:
            result = measure(game, overrides=arguments.set, folder=Path(temporary))
        print("\n".join(table([result])), flush=True)
        if result.rise < NEEDED_RISE or result.parity_nats > 1e-4:
            raise SystemExit(f"held-out of {game} rose by {result.rise:.3f}, parity {result.parity_nats:.1e} nats")
        kept = results() | {game: result}
        RESULTS.write_bytes(b"".join(msgspec.json.encode(kept[name]) + b"\n" for name in GAMES if name in kept))
    if arguments.write:
        write_section(NAME, table([*results().values()]), page=REPOSITORY / "docs" / "agents.md")


if __name__ == "__main__":
    main()
