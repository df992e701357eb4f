"""A tiny Qwen3, trained for a short time on solved examples. The quickstart and the tests use it. Its tokenizer has one
token for each character, or it is a chat model (`chat_tokenizer.py`).

It is an ordinary Hugging Face directory (safetensors, fast tokenizer, generation config) that vLLM can serve and
`AutoTokenizer` can read. Equal recipes give equal weights, because the warm-up uses one thread and one seed.
`tiny.json` contains the recipe's fingerprint. `ensure_description` makes the
directory without weights and fingerprint, before the warm-up. That is enough for an engine that gets its weights from
the learner. A directory without `tiny.json` was not made by asyncrl and is never changed.

Shapes: B examples, S positions.
"""

import contextlib
import json
import math
import os
import random
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
import xxhash
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from asyncrl.config.parts import part_configs
from asyncrl.config.schema import Config, TinyModelSection
from asyncrl.data.prompts import Task, fingerprint
from asyncrl.data.tokenizer import encode_prompt
from asyncrl.demo.chat_tokenizer import build_chat_tokenizer, fast_tokenizer
from asyncrl.demo.directory import TINY_RECIPE, is_tiny
from asyncrl.environments.agents import Demonstration
from asyncrl.environments.interfaces import build_demonstrations, build_tasks
from asyncrl.errors import DatasetError
from asyncrl.gateway.rendering import Renderer

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "\n" + "".join(chr(code) for code in range(0x20, 0x7F))

_REPLACED = "replaced"  # key in `tiny.json` of a model without weights: the fingerprint of the model that it replaced
_RECIPE_REVISION = 3  # increase it if a change of the code below gives other weights for an equal `model.tiny`
_REPORT_EVERY_STEPS = 25
_JUDGED_EXAMPLES = 128
_HELDOUT_TASKS = 256
_ROPE_THETA = 100.0
"""Base of the rotary embedding. Sequences have about ten characters. With the usual base of 10,000, most dimensions
would be nearly equal for neighbouring positions."""
_IGNORED = -100

Report = Callable[[str], None]


def ensure_model(
    config: Config, *, tasks: tuple[Sequence[Task], Sequence[Task]] | None = None, report: Report = print
) -> str:
    """Builds the tiny model at `config.model.path` if `model.tiny` is set and the model is not there yet. Returns the
    path.

    The model is built again if its recipe or the tasks of its warm-up have changed. If the environment makes the tasks,
    those of the warm-up have the seed `model.tiny.seed`, so runs with other seeds begin with the same model. A
    directory that this module did not write is used as it is. Without `model.tiny`, the path is returned unchanged,
    because it may be the id of a model on the Hub. `tasks` is the result of `build_tasks` if the caller has it.
    `model.max_length` (tokens) is the limit for prompt, answer and end-of-sequence token together. Raises DatasetError
    for a task that is longer, and, without `model.tiny.chat`, for one with characters other than printable ASCII and
    newlines.
    """
    section, path, max_length = config.model.tiny, Path(config.model.path), config.model.max_length
    if section is None or _is_foreign(path):
        return config.model.path
    train, heldout = tasks or build_tasks(config)
    of_run = [*train, *heldout]
    if config.run.seed != section.seed:
        config = config.model_copy(update={"run": config.run.model_copy(update={"seed": section.seed})})
        if any(part.data.dataset == "environment" for part in part_configs(config).values()):
            train, heldout = build_tasks(config)
    shown = build_demonstrations(config) if section.chat else []
    recipe = {"fingerprint": recipe_fingerprint(section, tasks=train, max_length=max_length, shown=shown)}
    was = _recipe_of(path)
    if was.get("fingerprint") == recipe["fingerprint"]:
        return config.model.path
    if was.get("fingerprint", was.get(_REPLACED)):
        report("tiny model: the recipe has changed, so the model is built again")
    tokenizer, described, recipe["description"] = _described(section, max_length=max_length)
    _check([*of_run, *train, *heldout], tokenizer=tokenizer, max_length=max_length)
    with _deterministic(section.seed):
        model = Qwen3ForCausalLM(described)  # type: ignore[no-untyped-call]
        report(f"tiny model: {model.num_parameters() / 1e6:.2f}M parameters, {len(train)} training tasks")
        examples = [_demonstrated(tokenizer, each, max_length=max_length) for each in shown]
        warm_up(model, tokenizer, section=section, tasks=train, heldout=heldout, report=report, demonstrated=examples)
    _put(path, parts=[model, tokenizer], recipe=recipe)
    report(f"tiny model: written to {path}")
    return config.model.path


def ensure_description(config: Config) -> str:
    """Writes the files of the tiny model to `config.model.path` that an engine reads beside its weights, if they are
    not there yet. `ensure_model` writes the same ones. Returns the path.

    A tiny model with another config or tokenizer there is replaced, so its weights are lost. A directory that this
    module did not write stays as it is. Without `model.tiny`, nothing is written.
    """
    section, path = config.model.tiny, Path(config.model.path)
    if section is None or _is_foreign(path):
        return config.model.path
    tokenizer, described, description = _described(section, max_length=config.model.max_length)
    recipe = {"description": description}
    was = _recipe_of(path)
    if was.get("description") != description:
        if "fingerprint" in was:
            recipe[_REPLACED] = was["fingerprint"]
        described.architectures = [Qwen3ForCausalLM.__name__]
        _put(path, parts=[described, GenerationConfig.from_model_config(described), tokenizer], recipe=recipe)
    return config.model.path


def build_tokenizer(*, max_length: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token for each character of printable ASCII and newline, and `<pad>` and `<eos>`.

    It adds no tokens when it encodes. It has no unknown token: other characters raise an error and do not vanish.
    """
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=None))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return fast_tokenizer(core, max_length=max_length, pad_token=PAD, eos_token=EOS)


def _described(section: TinyModelSection, *, max_length: int) -> tuple[PreTrainedTokenizerFast, Qwen3Config, str]:
    """Returns the tokenizer and the config of a tiny model, and a hash of both."""
    build = build_chat_tokenizer if section.chat else build_tokenizer
    tokenizer = build(max_length=max_length)
    described = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=section.hidden_size,
        intermediate_size=section.hidden_size,
        num_hidden_layers=section.layers,
        num_attention_heads=section.heads,
        num_key_value_heads=section.heads,
        head_dim=section.head_dim,
        max_position_embeddings=max_length,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return tokenizer, described, _hash([described.to_dict(), tokenizer.chat_template])


def recipe_fingerprint(
    section: TinyModelSection, *, tasks: Sequence[Task], max_length: int, shown: Sequence[Demonstration] = ()
) -> str:
    """Returns a hash of everything that determines the weights of a tiny model. If it is equal to the one in
    `tiny.json`, the model is not built again."""
    of_shown = [msgspec.json.encode(each).decode() for each in shown]
    return _hash(
        [
            _RECIPE_REVISION,
            section.model_dump(mode="json"),
            max_length,
            fingerprint(tasks),
            *([of_shown] if shown else []),
        ]
    )


def warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    section: TinyModelSection,
    tasks: Sequence[Task],
    heldout: Sequence[Task],
    report: Report,
    demonstrated: "Sequence[Example]" = (),
) -> None:
    """Trains with AdamW on the cross-entropy of answers: those of `demonstrated`, if there are any, else those of
    random tasks, with each part of a mixture equally often.

    It trains until the accuracy reaches `warmup_accuracy`. After that, the learning rate falls to 0 over
    `warmup_decay_steps`. It makes at most `warmup_steps` steps; their last `warmup_decay_steps` have the same fall.
    Without `demonstrated`, the accuracy on some of the `heldout` tasks is reported at the end.

    The number of steps that a seed needs varies by a third, and the accuracy rises steeply once it starts to rise. So
    only a rule that depends on the accuracy leaves about as much to learn for every seed. The decay of the learning
    rate ends the rise with more stable weights than a step at the full rate would give.
    """
    if section.warmup_steps and not tasks:
        raise DatasetError(
            "the tiny model needs training tasks for its warm-up, but there are none; check data.dataset, or set "
            "warmup_steps: 0"
        )
    draw, sizes = random.Random(section.seed), Counter(task.part for task in tasks)
    shares = [1 / sizes[task.part] for task in tasks] if len(sizes) > 1 else None
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0, fused=True)
    correct: deque[float] = deque(maxlen=math.ceil(_JUDGED_EXAMPLES / section.warmup_batch_size))
    last = section.warmup_steps
    model.train()
    for step in range(1, section.warmup_steps + 1):
        if demonstrated:
            examples = draw.choices(demonstrated, k=section.warmup_batch_size)
        else:
            drawn = draw.choices(tasks, shares, k=section.warmup_batch_size)
            examples = [_encode(tokenizer, _shown(task, draw, section=section)) for task in drawn]
        tokens_BS, labels_BS = _batch(examples, pad_id=tokenizer.pad_token_id)
        logits_BSV = model(input_ids=tokens_BS, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS[:, 1:].flatten(), ignore_index=_IGNORED)
        factor = min(1.0, step / 10, (last - step + 1) / section.warmup_decay_steps)
        for group in optimizer.param_groups:
            group["lr"] = section.warmup_learning_rate * factor
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # The accuracy on the examples before this step trained them. Nearly all examples of tasks are new to the model.
        correct.append(_exact_B(logits_BSV, labels_BS).float().mean().item())
        accuracy = sum(correct) / len(correct)
        if len(correct) == correct.maxlen and accuracy >= section.warmup_accuracy and last == section.warmup_steps:
            last = min(last, step + section.warmup_decay_steps)
        if step % _REPORT_EVERY_STEPS == 0 or step == last:
            report(f"tiny model: warm-up step {step}, loss {loss.item():.3f}, accuracy {accuracy:.2f}")
        if step == last:
            break
    model.train(False)
    if heldout and not demonstrated:
        accuracy = greedy_accuracy(model, tokenizer, tasks=heldout[:_HELDOUT_TASKS])
        report(f"tiny model: held-out accuracy {accuracy:.3f} (greedy, exact match)")


@torch.inference_mode()
def greedy_accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, tasks: Sequence[Task]) -> float:
    """Returns the share of `tasks` whose greedy completion equals the answer, including the end-of-sequence token."""
    pad_id = tokenizer.pad_token_id
    examples = [_encode(tokenizer, task) for task in tasks]
    correct = 0
    for start in range(0, len(examples), 64):
        tokens_BS, labels_BS = _batch(examples[start : start + 64], pad_id=pad_id)
        logits_BSV = model(input_ids=tokens_BS, use_cache=False).logits[:, :-1]
        correct += int(_exact_B(logits_BSV, labels_BS).sum())
    return correct / len(tasks)


Example = tuple[list[int], list[int]]
"""Token ids of a prompt, and of its answer with the end-of-sequence token."""


def _check(tasks: Sequence[Task], *, tokenizer: PreTrainedTokenizerFast, max_length: int) -> None:
    """Raises DatasetError for a task that the tokenizer cannot encode or that is too long."""
    for task in tasks:
        unknown = sorted(set(task.prompt + task.answer) - set(CHARACTERS))
        if unknown and not tokenizer.chat_template:
            raise DatasetError(
                f"task {task.question[:80]!r} has characters that the tiny model's tokenizer lacks: {unknown[:8]}; "
                "remove them from the task, or set model.tiny.chat"
            )
        tokens = sum(map(len, _encode(tokenizer, task)))
        if tokens > max_length:
            raise DatasetError(
                f"task {task.question[:80]!r} has {tokens} tokens with its answer and the end-of-sequence token, "
                f"which is more than model.max_length = {max_length}; raise model.max_length, or shorten the task"
            )


def _shown(task: Task, draw: random.Random, *, section: TinyModelSection) -> Task:
    """Returns the task as the warm-up shows it. In `warmup_wrong_fraction` of the cases, its answer is reversed."""
    wrong = draw.random() < section.warmup_wrong_fraction
    return msgspec.structs.replace(task, answer=task.answer[::-1]) if wrong else task


def _encode(tokenizer: PreTrainedTokenizerFast, task: Task) -> Example:
    return encode_prompt(tokenizer, task.input), [*tokenizer.encode(task.answer), tokenizer.eos_token_id]


def _demonstrated(tokenizer: PreTrainedTokenizerFast, shown: Demonstration, *, max_length: int) -> Example:
    """Returns the tokens of a demonstration. Raises DatasetError if there are too many."""
    prompt = Renderer(tokenizer).first(shown.messages, shown.tools)
    answer = [*tokenizer.encode(shown.answer), tokenizer.eos_token_id]
    if len(prompt) + len(answer) > max_length:
        raise DatasetError(
            f"a demonstration of the environment has {len(prompt) + len(answer)} tokens, more than model.max_length = "
            f"{max_length}; raise model.max_length"
        )
    return prompt, answer


def _batch(examples: Sequence[Example], *, pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and labels, both (B, S), padded on the right. A label is the token itself in the answer, and
    `_IGNORED` elsewhere."""
    longest = max(len(prompt) + len(answer) for prompt, answer in examples)
    tokens_BS = torch.full((len(examples), longest), pad_id)
    labels_BS = torch.full((len(examples), longest), _IGNORED)
    for row, (prompt, answer) in enumerate(examples):
        end = len(prompt) + len(answer)
        tokens_BS[row, :end] = torch.tensor(prompt + answer)
        labels_BS[row, len(prompt) : end] = torch.tensor(answer)
    return tokens_BS, labels_BS


def _exact_B(logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
    """Returns True for each row whose whole answer greedy decoding would give. Logits belong to the position before
    each label.

    With a causal mask, one forward pass over prompt and answer is enough: greedy decoding follows the answer as long as
    it is right, and padding on the right does not affect tokens on the left.
    """
    wanted_BS = labels_BS[:, 1:]
    return ((logits_BSV.argmax(dim=-1) == wanted_BS) | (wanted_BS == _IGNORED)).all(dim=1)


def _put(path: Path, *, parts: Sequence[Any], recipe: dict[str, str]) -> None:
    """Saves `parts` and their recipe as the directory `path`, which gets its name when it is complete. An older tiny
    model there is moved away right before that, and removed. A model with the same recipe that another process puts
    there in between is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
        built = Path(scratch, "model")
        with _no_progress_bar():
            for part in parts:
                part.save_pretrained(built)
        (built / TINY_RECIPE).write_text(json.dumps(recipe) + "\n")
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, Path(scratch, "replaced"))
        try:
            os.rename(built, path)
        except OSError:
            # another process has just put a model there; it is equal to this one if it has the same recipe
            theirs = _recipe_of(path)
            if any(theirs.get(key) != value for key, value in recipe.items() if key != _REPLACED):
                raise


def _is_foreign(path: Path) -> bool:
    return path.exists() and not is_tiny(path)


def _recipe_of(path: Path) -> dict[str, str]:
    """Returns the content of `tiny.json` in the directory: the hashes of the recipe from which the model was built. It
    is empty if the file is missing or cannot be read."""
    try:
        recipe = json.loads((path / TINY_RECIPE).read_text())
    except (OSError, ValueError):
        return {}
    return recipe if isinstance(recipe, dict) else {}


def _hash(value: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Switches off the progress bar that transformers would show for the one file that it writes."""
    with contextlib.ExitStack() as after:
        if transformers_logging.is_progress_bar_enabled():
            transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
            after.callback(transformers_logging.enable_progress_bar)
        yield


@contextlib.contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    """Uses one thread and the random numbers of the seed. Restores the process's own settings afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
