"""Trains a model with TRL's synchronous GRPOTrainer on CPUs. `against_trl.py` starts this file.

    .bench/trl/bin/python benchmarks/trl_run.py SETTINGS.json

TRL's own environment runs this file, so it imports nothing of asyncrl. `Settings` has what it needs. The file writes
into `output`:

- `begun.json`: the Unix time at the beginning of the first step;
- `steps.jsonl`: one line a step, with the Unix time at its end, its samples, and their mean reward;
- `step-N/`: the weights after N steps, every `save_every_steps` steps and at the end.

The trainer is set as a user would set it who wants speed: float32, the whole step in one pass, static-batch generation
by transformers, no reports, no saves of its own, no gradient checkpointing, no reference model.
"""

import json
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run. `against_trl.py` takes all numbers from asyncrl's configuration."""

    model: str
    """Directory of the model and its tokenizer."""
    questions: str
    """JSON-lines file of `prompt` and `answer`: the questions of all steps in the order of training."""
    output: str
    threads: int
    seed: int
    groups_per_step: int
    group_size: int
    max_completion_tokens: int
    learning_rates: list[float]
    """The learning rate of each step, so its length is the number of steps."""
    betas: list[float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    save_every_steps: int
    reward: str
    """`exact_match` or `by_checksum`."""


def by_checksum(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """Returns a fixed number in [0, 1) for each pair of prompt and completion, as `rewards.by_checksum` does."""
    pairs = zip(prompts, completions, strict=True)
    return [zlib.crc32(f"{prompt}\n{completion}".encode()) / 2**32 for prompt, completion in pairs]


def exact_match(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Returns 1.0 for each completion that equals its answer, else 0.0.

    The rule is that of reasoning-gym's spell_backward with asyncrl's `exact`: white space at the completion's ends and
    upper and lower case do not count.
    """
    return [
        float(completion.strip().lower() == expected.lower())
        for completion, expected in zip(completions, answer, strict=True)
    ]


REWARDS: dict[str, Callable[..., list[float]]] = {"exact_match": exact_match, "by_checksum": by_checksum}


def config_of(settings: Settings) -> Any:
    """Returns the GRPOConfig."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=settings.output,
        seed=settings.seed,
        max_steps=len(settings.learning_rates),
        use_cpu=True,
        bf16=False,
        # one batch of completions a step, trained in one pass
        per_device_train_batch_size=settings.groups_per_step * settings.group_size,
        gradient_accumulation_steps=1,
        num_generations=settings.group_size,
        num_iterations=1,
        max_completion_length=settings.max_completion_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        shuffle_dataset=False,
        # As in asyncrl's default: the mean over all tokens of the step, advantages divided by the deviation of the
        # group, no KL term. A batch is trained once, so all ratios are 1, and the clip bounds have no effect.
        loss_type="dapo",
        scale_rewards="group",
        beta=0.0,
        max_grad_norm=settings.max_grad_norm,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


class Records(TrainerCallback):  # type: ignore[misc]
    """Writes the times, the rewards and the weights."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._output = Path(settings.output)
        self._rewards: list[float] = []

    def reward(self, **columns: Any) -> list[float]:
        """Returns the rewards of a step, and keeps them for its record."""
        self._rewards = REWARDS[self._settings.reward](**columns)
        return self._rewards

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
        if state.global_step == 0:
            (self._output / "begun.json").write_text(json.dumps({"unix_s": time.time()}))

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: object) -> None:
        done, samples = int(state.global_step), len(self._rewards)
        record = {"unix_s": time.time(), "samples": samples, "reward_mean": sum(self._rewards) / samples}
        with (self._output / "steps.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        if done % self._settings.save_every_steps == 0 or done == len(self._settings.learning_rates):
            model.save_pretrained(self._output / f"step-{done}")


def train(settings: Settings) -> None:
    from datasets import Dataset
    from trl import GRPOTrainer

    torch.set_num_threads(settings.threads)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    rates, peak = settings.learning_rates, max(settings.learning_rates)
    # transformers' own default is the fused AdamW, too
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=peak,
        betas=(settings.betas[0], settings.betas[1]),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    # The schedule is also asked for the step after the last one.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[min(step, len(rates) - 1)] / peak)
    records = Records(settings)
    trainer = GRPOTrainer(
        model=model,
        args=config_of(settings),
        reward_funcs=records.reward,
        train_dataset=Dataset.from_list(list(map(json.loads, Path(settings.questions).read_text().splitlines()))),
        processing_class=AutoTokenizer.from_pretrained(settings.model),
        callbacks=[records],
        optimizers=(optimizer, schedule),
    )
    trainer.train()


if __name__ == "__main__":
    train(Settings(**json.loads(Path(sys.argv[1]).read_text())))
