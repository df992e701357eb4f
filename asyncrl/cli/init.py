"""`asyncrl init MODEL DATA`: writes a first configuration for the user's model and dataset."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from asyncrl.cli.gpu_checks import Gpu, Gpus, query_gpus
from asyncrl.cli.preflight import check_model, checked_config, try_hub
from asyncrl.cli.terminal import print_warnings, say
from asyncrl.config.import_path import BUILT_IN_NAMES, REWARDS_WITH_OPTIONS, is_import_path, reward_term
from asyncrl.config.load import parse_yaml
from asyncrl.config.schema import Config
from asyncrl.config.starter import Facts, starter_yaml
from asyncrl.data.hugging_face import FORMATS
from asyncrl.data.prompts import Task, in_conversation
from asyncrl.data.prompts import split as hold_out
from asyncrl.data.rows import FIRST_ROWS, NO_ANSWER, OnBadRow, columns_for, likely_columns
from asyncrl.environments.interfaces import dataset_rows, read_tasks
from asyncrl.errors import ConfigError, DatasetError
from asyncrl.policy.model_directory import read_model

LOOKED_AT = 10_000
"""Number of first prompts whose lengths are measured, with those of their answers. This takes seconds and finds the
longest prompt of most datasets."""
FEW_HELDOUT = 20
"""With fewer held-out questions than this, a single one moves the held-out reward by more than 0.05."""
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def init(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory or Hugging Face Hub id of a model.")],
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="File of questions and answers (.jsonl, .csv, .parquet, .json, .arrow), a folder of such files, a "
            "dataset of the Hugging Face Hub (owner/name), or package.module:function that returns tasks.",
        ),
    ],
    prompt: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of the prompts; default: `prompt`, or a likely one.")
    ] = None,
    answer: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help=f"Column of the answers; default: `answer`, or a likely one. {NO_ANSWER}: there are no answers.",
        ),
    ] = None,
    subset: Annotated[str | None, typer.Option(metavar="NAME", help="Subset of a dataset on the Hub.")] = None,
    split: Annotated[
        str, typer.Option(metavar="SPLIT", help="Split of a dataset on the Hub, or a part of it.")
    ] = "train",
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write.")] = Path("run.yaml"),
    reward: Annotated[
        str,
        typer.Option(
            metavar="REWARD", help=f"{', '.join(BUILT_IN_NAMES['environment.reward'])}, or package.module:function."
        ),
    ] = "exact_match",
    completion_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Maximum length of a completion, tokens; default: four times the longest answer.",
        ),
    ] = None,
    system_prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Message of the system before each prompt, for a model with a chat template; default: the text of a "
            "column `system_prompt` or `system`, if it is the same in all rows.",
        ),
    ] = None,
    on_bad_row: Annotated[
        OnBadRow, typer.Option(metavar="refuse|skip", help="Whether rows that cannot be used are skipped.")
    ] = "refuse",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a first configuration, whose numbers fit together and fit your model and your data.

    The command finds the columns of your data, measures prompts and answers with the model's tokenizer, looks for GPUs,
    and checks the file that it wrote.

    \b
      asyncrl init models/my-llama questions.jsonl
      asyncrl init models/my-llama mine.csv --prompt problem --answer result
      asyncrl init models/my-chat-model mine.csv --system-prompt "Answer with a number only."
      asyncrl init Qwen/Qwen2.5-1.5B-Instruct agentica-org/DeepScaleR-Preview-Dataset --reward math_verify
      asyncrl up -c run.yaml
    """
    if output.exists() and not force:
        raise ConfigError(f"{output} exists already; name another file with --output, or add --force")
    if reward in REWARDS_WITH_OPTIONS:
        raise ConfigError(
            f"--reward {reward}: needs options that this command cannot measure; leave --reward out, and write "
            f"`{reward_term(reward)}` in the place of `reward` into {output}, with your own options (docs/rewards.md"
            f"{'; asyncrl recipes copy judge writes an example' if reward == 'judge' else ''})"
        )
    _check_model(model)
    section = _section(data, subset=subset, split=split, prompt=prompt, answer=answer)
    if on_bad_row == "skip":
        section["on_bad_row"] = on_bad_row
    if system_prompt is not None:
        section["system_prompt"] = system_prompt
    _write_starter(output, section, model=model, reward=reward, completion=completion_tokens, named=data)


def _write_starter(
    output: Path, section: dict[str, Any], *, model: str, reward: str, completion: int | None, named: str
) -> None:
    """Measures the data, writes and checks the configuration, and prints what the next commands are."""
    reading = Config.model_validate({"data": section})
    try:
        tasks = read_tasks(reading)  # in the same way as a run
    except DatasetError as error:  # it advises to change the configuration, which is not written yet
        raise DatasetError(str(error).replace("set data.on_bad_row: skip", "add --on-bad-row skip")) from error
    if not tasks:
        raise ConfigError(f"{named}: has no prompts; name a dataset with at least one")
    tasks, found = _with_system_prompt(tasks, section, model=model)
    facts = _facts(model, section, tasks[:LOOKED_AT], prompts=len(tasks), reward=reward, completion=completion)
    warnings = _write_checked(output, starter_yaml(_with_numbers(facts)))
    _, heldout = hold_out(tasks, reading.data.heldout_fraction)
    say(
        f"wrote {output}: {facts.prompts} prompts of at most {facts.longest_prompt} tokens, {len(heldout)} of them "
        f"held out for evaluation, {_places(facts.gpus)}"
    )
    for name, column in section.get("columns", {}).items():
        say(f"data.columns: {name} is {f'the column {column}' if column else 'left out'}")
    for line in (*_other_answers(tasks, section), *found):
        say(line)
    if not heldout:
        warnings.append(
            "the run will have no held-out evaluation, because none of the prompts is held out: a hash of the prompt "
            f"selects about data.heldout_fraction = {reading.data.heldout_fraction} of them; add prompts, or raise "
            "data.heldout_fraction"
        )
    elif len(heldout) < FEW_HELDOUT:
        warnings.append(
            f"the held-out reward will be the mean of only {len(heldout)} questions, so it is coarse; add prompts, or "
            "raise data.heldout_fraction"
        )
    print_warnings(warnings)
    say(f"look at the prompts: asyncrl data show -c {output}")
    say(f"start it with: asyncrl up -c {output}")


def _section(data: str, *, subset: str | None, split: str, prompt: str | None, answer: str | None) -> dict[str, Any]:
    """Returns the keys of the section `data` for DATA and the options about it. Raises DatasetError if DATA cannot be
    read, and ConfigError if its columns are not known, or if columns are given for a function."""
    path, section = Path(data), dict[str, Any]()
    is_table = path.suffix in FORMATS and path.suffix != ".jsonl"
    if is_import_path(data):
        section = {"dataset": data}
    elif is_table or path.is_dir() or (path.suffix != ".jsonl" and not path.exists() and _HUB_ID.fullmatch(data)):
        section = {"dataset": "hf", "path": data}
    else:
        section = {"dataset": "jsonl", "path": str(path)}
    section |= {} if subset is None else {"subset": subset}
    section |= {} if split == "train" else {"split": split}
    names = _columns_of(Config.model_validate({"data": section}))
    if names is not None:
        columns = columns_for(names, prompt=prompt, answer=answer, source=data)
        section |= {"columns": columns} if columns else {}
    elif is_import_path(data) and (prompt, answer) != (None, None):
        raise ConfigError(
            f"--prompt and --answer: are for files and datasets, not for the function {data}; remove them"
        )
    return section


def _columns_of(config: Config) -> list[str] | None:
    """Returns the keys, and those of nested objects as `key.name`, that have a value in one of the first rows of a file
    or of a dataset on the Hub. Returns None if the rows come from code, if there are none, or if the first one is not
    an object."""
    if config.data.dataset not in ("hf", "jsonl"):
        return None
    _, rows = dataset_rows(config)
    first = list(islice(rows, FIRST_ROWS))
    if not first or not isinstance(first[0], Mapping):
        return None
    names: dict[str, None] = {}
    for row in first:
        for key, value in row.items() if isinstance(row, Mapping) else ():
            inner = value if isinstance(value, Mapping) else {}
            names |= {} if value is None else {str(key): None}
            names |= {f"{key}.{name}": None for name, found in inner.items() if found is not None}
    return [*names]


def _other_answers(tasks: Sequence[Task], section: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line if another column of the rows than the one in use may have the answers."""
    if section.get("columns", {}).get("answer", "answer") is None:
        return
    texts = (key for task in tasks[:FIRST_ROWS] for key, value in task.metadata.items() if isinstance(value, str | int))
    if others := likely_columns("answer", texts):
        yield f"data.columns: the answer may also be the column {', '.join(others)}: choose with --answer COLUMN"


def _with_system_prompt(tasks: list[Task], section: dict[str, Any], *, model: str) -> tuple[list[Task], Sequence[str]]:
    """If the rows have a column with a system prompt, adds its text to the section `data` and to the prompts, unless
    the text differs between rows, rows have messages of the system, or the model has no chat template. Returns the
    tasks, and lines about the column. Does nothing if the section has a system prompt already."""
    columns = likely_columns("system_prompt", (key for task in tasks[:FIRST_ROWS] for key in task.metadata))
    if not columns or "system_prompt" in section:
        return tasks, ()
    what, values = f"the column {columns[0]}", [task.metadata.get(columns[0]) for task in tasks]
    if not any(values):
        return tasks, ()
    text = values[0]
    if not isinstance(text, str) or not text.strip() or any(value != text for value in values):
        return tasks, [
            f"data.system_prompt: not taken from {what}, whose values are not the same text in all rows: a run has one "
            "system prompt; write different ones into the rows, as `messages` that begin with a message of the system"
        ]
    if any(task.messages and task.messages[0]["role"] == "system" for task in tasks):
        return tasks, [f"data.system_prompt: not taken from {what}, because rows have messages of the system"]
    from asyncrl.data.tokenizer import load_tokenizer

    if not getattr(load_tokenizer(model), "chat_template", None):
        return tasks, [f"data.system_prompt: not taken from {what}, because {model} has no chat template"]
    section["system_prompt"] = text
    return in_conversation(tasks, system_prompt=text, examples=()), [f"data.system_prompt: the text of {what}"]


def _check_model(model: str) -> None:
    """Raises ConfigError if the model is neither on this machine nor on the Hugging Face Hub, or if a model on this
    machine is incomplete or not supported."""
    shortest = {"path": model, "max_length": 1}  # the length is chosen later, from the prompts
    config = Config.model_validate({"model": shortest, "generator": {"gpus": min(1, len(_gpus()))}})
    check_model(config)
    try_hub(config)


def _write_checked(output: Path, text: str) -> list[str]:
    """Writes the configuration and checks it. Returns warnings.

    Raises ConfigError if the file cannot be written. Also raises it if the configuration cannot run, and restores the
    earlier file, or removes the new one if there was none.
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
    model: str, data: Mapping[str, Any], tasks: Sequence[Task], *, prompts: int, reward: str, completion: int | None
) -> Facts:
    """Measures `tasks` with the model's tokenizer, and collects the facts for `starter_yaml`."""
    from asyncrl.data.tokenizer import encode_prompts, load_tokenizer

    tokenizer, gpus = load_tokenizer(model, chat="auto"), _gpus()
    answers = tokenizer([task.answer for task in tasks], add_special_tokens=False)["input_ids"]
    source = Path(data.get("path") or data["dataset"].partition(":")[0]).stem
    name = re.sub(r"[^a-zA-Z0-9.]+", "-", source)[:64]
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
        gpus=len(gpus),
        conversations=any(task.messages for task in tasks),
        offers_system_prompt=bool(getattr(tokenizer, "chat_template", None))
        and not any(task.messages and task.messages[0]["role"] == "system" for task in tasks),
        gpu_gib=min((gpu.memory_mib / 1024 for gpu in gpus), default=0.0),
    )


def _positions(model: str) -> int | None:
    """Returns the maximum sequence length of the model, from its directory or from the Hugging Face Hub, tokens; None
    if its config.json does not have it. Raises ConfigError if config.json cannot be read."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    path = Path(model, "config.json")
    try:
        return read_model((path if path.is_file() else Path(hf_hub_download(model, "config.json"))).parent).positions
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"MODEL {model}: its config.json cannot be read ({error}); name a model's directory, or a model of the "
            "Hugging Face Hub"
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


def _gpus() -> tuple[Gpu, ...]:
    """Returns the GPUs of this machine; none if `nvidia-smi` is missing or fails."""
    found = query_gpus()
    return found.gpus if isinstance(found, Gpus) else ()


def _with_numbers(facts: Facts) -> Facts:
    """Returns `facts` with the settings of the learner that fit the memory of this machine's GPUs (`gpu_numbers`).
    Returns `facts` unchanged if there is no GPU, or if the shapes of the model's parameters are not known."""
    if not facts.gpus:
        return facts
    from asyncrl.cli.plan import specs_of  # imports torch and transformers
    from asyncrl.deployment.memory_plan import gpu_numbers

    config = Config.model_validate(parse_yaml(starter_yaml(facts), source="the first configuration"))
    try:
        parameters = specs_of(config)
    except ConfigError:
        return facts
    numbers = gpu_numbers(config, parameters, gpus=facts.gpus, gpu_gib=facts.gpu_gib, reference=False)
    return dataclasses.replace(facts, numbers=numbers)
