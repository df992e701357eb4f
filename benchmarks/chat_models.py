"""Trains tiny chat models of two families on conversations, and checks every row that was trained.

    python benchmarks/chat_models.py llama           # a run of two minutes on two cores, and its audit
    python benchmarks/chat_models.py qwen3
    python benchmarks/chat_models.py --write          # writes the table of both into docs/benchmarks.md

Both models have a real byte-level BPE tokenizer and a chat template. The questions are those of configs/larger.csv, as
conversations in a parquet file, which the run reads with the library `datasets`. The run keeps the rows of every step,
so that each of these can be checked:

- The prompt is what the chat template makes of the question, and no token of it is trained: not its special tokens, and
  not the tokens with which the template ends a turn.
- Every sampled token is trained, with the token that ends the turn. Nothing follows that token.
- `asyncrl audit` scores every trained token under the weights that sampled it.
"""

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from report_page import REPOSITORY, busy_percent, provenance, write_section

from asyncrl.config.load import load_config

NAME = "chat_models.py"
RESULTS = Path(__file__).with_suffix(".jsonl")
RECIPE = REPOSITORY / "configs" / "tiny_chat.yaml"
FAMILIES = ("llama", "qwen3")
NEEDED_RISE = 0.3
COMMAND_TIMEOUT_S = 280


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A run of one family. `replay` is what the audit says about the trained tokens."""

    family: str
    provenance: str
    parameters: int
    steps: int
    seconds: float
    reward: tuple[float, float]
    heldout: tuple[float, float]
    parity_nats: float
    rows: int
    prompt_tokens: int
    special_prompt_tokens: int
    sampled_tokens: int
    sampled_ends: int
    replay: str

    @property
    def rise(self) -> float:
        return self.reward[1] - self.reward[0]


def write_conversations(path: Path, rows: Sequence[tuple[str, str]]) -> None:
    """Writes solved conversations as a parquet file; the last message of each is the answer."""
    import datasets

    conversations = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in rows
    ]
    datasets.Dataset.from_list(conversations).to_parquet(path)


def tiny_llama(*, max_length: int, hidden_size: int = 128, layers: int = 3) -> tuple[Any, Any]:
    """Returns a random Llama and its tokenizer, that of asyncrl's tiny chat model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from asyncrl.demo.chat_tokenizer import build_chat_tokenizer

    tokenizer = build_chat_tokenizer(max_length=max_length)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        head_dim=32,
        max_position_embeddings=max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config), tokenizer


def build_model(family: str, *, overrides: Sequence[str], path: Path) -> None:
    """Builds the model of a family at `path`, and warms it up as configs/tiny_chat.yaml says."""
    import torch

    from asyncrl.demo.tiny_model import ensure_model, warm_up
    from asyncrl.environments.interfaces import build_tasks

    config = load_config([RECIPE], [*overrides, f"model.path={path}", "model.tiny.chat=true"])
    if family == "qwen3":
        ensure_model(config)
        return
    assert config.model.tiny is not None
    train, heldout = build_tasks(config)
    torch.set_num_threads(1)
    torch.manual_seed(config.model.tiny.seed)
    model, tokenizer = tiny_llama(max_length=config.model.max_length)
    warm_up(model, tokenizer, section=config.model.tiny, tasks=train, heldout=heldout, report=print)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def command(*arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Runs an asyncrl command, and returns its output. Raises RuntimeError with the output if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"asyncrl {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def checked_rows(run: Path, *, model: Path) -> Counter[str]:
    """Checks the rows of every step of a run, and returns the number of rows and of tokens by kind.

    Raises AssertionError with the row's tokens for one that is not as the text at the top of this file says.
    """
    from asyncrl.data.tokenizer import encode_prompts, load_tokenizer
    from asyncrl.environments.interfaces import build_tasks
    from asyncrl.learner.saving import KeptSteps

    tokenizer = load_tokenizer(str(model))
    prompts = {tuple(ids) for ids in encode_prompts(tokenizer, [task.input for task in build_tasks(_config(run))[0]])}
    special, end = set(tokenizer.all_special_ids), tokenizer.eos_token_id
    found: Counter[str] = Counter()
    kept = KeptSteps(run)
    for version in kept.versions():
        batch = kept.batch(version)
        if batch is None:
            continue  # no step began with the last version
        lease, rows = batch
        truncated = [cut for group in lease.groups for cut in group.meta.truncated]
        for row, length in enumerate(rows["input_lengths"].tolist()):
            ids, mask = rows["input_ids"][row, :length].tolist(), rows["token_mask"][row, :length].tolist()
            begin = mask.index(1.0)
            prompt, sampled = ids[:begin], ids[begin:]
            text = tokenizer.decode(ids)
            assert tuple(prompt) in prompts, f"not the prompt of a task: {text}"
            assert set(mask[:begin]) == {0.0}, f"trained tokens in a prompt: {text}"
            assert set(mask[begin:]) == {1.0}, f"sampled tokens without training: {text}"
            assert end not in sampled[:-1], f"tokens after the end of the turn: {text}"
            assert truncated[row] or sampled[-1] == end, f"no end of the turn: {text}"
            found.update(rows=1, prompt=begin, sampled=len(sampled), ends=int(sampled[-1] == end))
            found["special"] += sum(each in special for each in prompt)
    return found


def _config(run: Path) -> Any:
    return load_config([run / "config.yaml"], [])


def measure(family: str, *, steps: int, folder: Path) -> Result:
    """Builds a model, trains it, and checks its rows and its tokens."""
    import torch
    from safetensors import safe_open

    busy = busy_percent()
    data, model = folder / "chat.parquet", folder / family
    with (REPOSITORY / "configs" / "larger.csv").open(newline="") as file:
        write_conversations(data, [(row["question"], row["solution"]) for row in csv.DictReader(file)])
    overrides = [f"run.dir={folder}", f"data.path={data}", "data.columns={}", f"learner.total_steps={steps}"]
    build_model(family, overrides=overrides, path=model)
    command(
        *("up", "-c", str(RECIPE), *overrides, f"model.path={model}", "model.tiny=null"),
        *("audit.keep_weights=all", "eval.every_steps=20", "checkpoint.every_steps=0"),
    )
    run = folder / "tiny-chat"
    audited = command("audit", str(run))
    summary = json.loads((run / "summary.json").read_bytes())
    rows = checked_rows(run, model=model)
    replay = re.search(r"\d+ tokens were scored again.*? nats", audited)
    assert replay is not None, audited
    with safe_open(model / "model.safetensors", framework="pt") as tensors:
        parameters = sum(torch.Size(tensors.get_slice(name).get_shape()).numel() for name in tensors.keys())  # noqa: SIM118
    return Result(
        family=family,
        provenance=provenance(f"benchmarks/{NAME}", busy_percent=busy),
        parameters=parameters,
        steps=summary["steps"],
        seconds=summary["wall_s"],
        reward=(summary["reward_first"], summary["reward_last"]),
        heldout=(summary["heldout_first"], summary["heldout_last"]),
        parity_nats=summary["parity_max_nats"],
        rows=rows["rows"],
        prompt_tokens=rows["prompt"],
        special_prompt_tokens=rows["special"],
        sampled_tokens=rows["sampled"],
        sampled_ends=rows["ends"],
        replay=replay[0],
    )


def results() -> dict[str, Result]:
    """Returns the newest result of each family."""
    lines = RESULTS.read_bytes().splitlines() if RESULTS.exists() else []
    found = [msgspec.json.decode(line, type=Result) for line in lines]
    return {result.family: result for result in sorted(found, key=lambda result: FAMILIES.index(result.family))}


def table(found: Sequence[Result]) -> list[str]:
    """Returns the lines of the section in docs/benchmarks.md."""
    heads = (
        "model", "parameters", "steps, s", "reward", "held-out", "parity, nats", "rows", "tokens of prompts, mask 0",
        "sampled tokens, mask 1", "scored again",
    )  # fmt: skip
    lines = [*(result.provenance for result in found), ""]
    lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for one in found:
        cells = (
            one.family,
            f"{one.parameters / 1e6:.2f} million",
            f"{one.steps}, {one.seconds:.0f}",
            f"{one.reward[0]:.3f} → {one.reward[1]:.3f} (+{one.rise:.3f})",
            f"{one.heldout[0]:.3f} → {one.heldout[1]:.3f}",
            f"{one.parity_nats:.1e}",
            f"{one.rows:,}",
            f"{one.prompt_tokens:,}, of which {one.special_prompt_tokens:,} special",
            f"{one.sampled_tokens:,}, of which {one.sampled_ends:,} end a turn",
            one.replay,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"families to run: {', '.join(FAMILIES)}")
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--write", action="store_true", help="write the results into docs/benchmarks.md")
    arguments = parser.parse_args()
    if unknown := set(arguments.families) - set(FAMILIES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; the families are {', '.join(FAMILIES)}")
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as temporary:
            result = measure(family, steps=arguments.steps, folder=Path(temporary))
        print("\n".join(table([result])), flush=True)
        if result.rise < NEEDED_RISE or result.parity_nats > 1e-4:
            raise SystemExit(f"the reward of {family} rose by {result.rise:.3f}, parity {result.parity_nats:.1e} nats")
        kept = results() | {family: result}
        RESULTS.write_bytes(b"".join(msgspec.json.encode(kept[name]) + b"\n" for name in FAMILIES if name in kept))
    if arguments.write:
        write_section(NAME, table([*results().values()]))


if __name__ == "__main__":
    main()
