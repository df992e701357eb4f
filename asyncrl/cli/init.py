"""`asyncrl init MODEL DATA`: writes a first configuration for the user's model and dataset."""

import math
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.before_start import try_hub
from asyncrl.cli.options import checked_config, print_warnings
from asyncrl.cli.presence import check_model
from asyncrl.cli.terminal import say
from asyncrl.config.import_path import is_import_path
from asyncrl.config.schema import Config
from asyncrl.config.starter import Facts, starter_yaml
from asyncrl.data.prompts import Task, split
from asyncrl.environments.interfaces import read_tasks
from asyncrl.errors import ConfigError
from asyncrl.policy.model_directory import read_model

LOOKED_AT = 10_000
"""Number of prompts whose lengths are measured. This takes seconds and finds the longest prompt of most datasets."""


def init(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory or Hugging Face Hub id of a model.")],
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="JSONL file with `prompt` and `answer` in each line, or package.module:function that returns tasks.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write.")] = Path("run.yaml"),
    reward: Annotated[
        str, typer.Option(metavar="REWARD", help="exact_match, math_verify, or package.module:function.")
    ] = "exact_match",
    completion_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            show_default=False,
            help="Maximum length of a completion, tokens; default: four times the longest answer.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a first configuration, whose numbers fit together and fit your model and your data.

    The command measures prompts and answers with the model's tokenizer, looks for GPUs, and checks the file that it
    wrote.

    \b
      asyncrl init models/my-llama questions.jsonl
      asyncrl up -c run.yaml
    """
    if output.exists() and not force:
        raise ConfigError(f"{output} exists already; name another file with --output, or add --force")
    _check_model(model)
    section = {"dataset": data} if is_import_path(data) else {"dataset": "jsonl", "path": str(Path(data))}
    reading = Config.model_validate({"data": section})
    tasks = read_tasks(reading)  # in the same way as a run
    if not tasks:
        raise ConfigError(f"{data}: has no prompts; name a dataset with at least one")
    facts = _facts(model, section, tasks[:LOOKED_AT], prompts=len(tasks), reward=reward, completion=completion_tokens)
    warnings = _write_checked(output, starter_yaml(facts))
    _, heldout = split(tasks, reading.data.heldout_fraction)
    say(
        f"wrote {output}: {facts.prompts} prompts of at most {facts.longest_prompt} tokens, {len(heldout)} of them "
        f"held out for evaluation, {_places(facts.gpus)}"
    )
    if not heldout:
        warnings.append(
            "the run will have no held-out evaluation, because none of the prompts is held out: a hash of the prompt "
            f"selects about data.heldout_fraction = {reading.data.heldout_fraction} of them; add prompts, or raise "
            "data.heldout_fraction"
        )
    print_warnings(warnings)
    say(f"start it with: asyncrl up -c {output}")


def _check_model(model: str) -> None:
    """Raises ConfigError if the model is neither on this machine nor on the Hugging Face Hub."""
    shortest = {"path": model, "max_length": 1}  # the length is chosen later, from the prompts
    config = Config.model_validate({"model": shortest, "generator": {"gpus": min(1, _gpus())}})
    check_model(config)
    try_hub(config)


def _write_checked(output: Path, text: str) -> list[str]:
    """Writes the configuration and checks it. Returns warnings.

    Raises ConfigError if the file cannot be written. Also raises it if the configuration cannot run, and restores the
    file.
    """
    before = output.read_bytes() if output.exists() else None
    try:
        output.write_text(text, encoding="utf-8")
        return checked_config([output], [])[1]
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}; name a file that can be written") from None
    except ConfigError:
        if before is None:
            output.unlink()
        else:
            output.write_bytes(before)
        raise


def _places(gpus: int) -> str:
    return f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "no GPU: generators and learner run on CPUs"


def _facts(
    model: str, data: Mapping[str, str], tasks: Sequence[Task], *, prompts: int, reward: str, completion: int | None
) -> Facts:
    """Measures `tasks` with the model's tokenizer, and collects the facts for `starter_yaml`."""
    from asyncrl.data.tokenizer import encode_prompts, load_tokenizer

    tokenizer = load_tokenizer(model, chat="auto")
    answers = tokenizer([task.answer for task in tasks], add_special_tokens=False)["input_ids"]
    name = Path(data.get("path") or data["dataset"].partition(":")[0]).stem.replace("_", "-")
    return Facts(
        name=name if name[:1].isalnum() else "run",
        model=model,
        data=data,
        reward=reward,
        prompts=prompts,
        longest_prompt=max(map(len, encode_prompts(tokenizer, [task.input for task in tasks]))),
        longest_answer=1 + max(map(len, answers)),  # 1 for the end-of-sequence token
        completion_tokens=completion,
        longest_model=_positions(model),
        parameters=_parameters(model),
        gpus=_gpus(),
    )


def _positions(model: str) -> int | None:
    """Returns the maximum sequence length of the model, from its directory or from the Hugging Face Hub, tokens."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    path = Path(model, "config.json")
    try:
        return read_model((path if path.is_file() else Path(hf_hub_download(model, "config.json"))).parent).positions
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"MODEL {model}: its config.json cannot be read ({error}); name a model's directory, or a model of the "
            "Hugging Face Hub",
            key="model.path",
        ) from None


def _parameters(model: str) -> int | None:
    """Returns the number of parameters, read from the headers of the safetensors files in the directory `model`.

    None if there are no such files, for example for a model of the Hugging Face Hub.
    """
    from safetensors import safe_open

    files = sorted(Path(model).glob("*.safetensors"))
    total = 0
    for file in files:
        with safe_open(file, framework="numpy") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total or None


def _gpus() -> int:
    """Returns the number of GPUs that the NVIDIA driver of this machine lists."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
