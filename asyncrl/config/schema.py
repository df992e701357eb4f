"""The schema of the configuration: every key that a user may set, its type, its bounds and its default.

Each field gives its unit in its name or in its docstring. A key that is not in the schema is refused. The rules that
involve several fields are in `rules.py`. `python -m asyncrl.config.docs` generates `docs/configuration.md` from these
classes and docstrings.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from asyncrl.config.import_path import ADAMW, OF_SEVERAL_TURNS, OwnCallable

# Types and marks of the fields of the schema.

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Temperature = Annotated[float, Field(gt=0, le=2)]
"""A sampling temperature. vLLM refuses values above 2."""
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
DecayRate = Annotated[float, Field(ge=0, lt=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


@dataclass(frozen=True, slots=True)
class Mark:
    """A property of a field that its type does not show. The annotation of the field contains the mark."""

    name: str


PER_DEPLOYMENT = Mark("per deployment")
"""The deployments of one run may have different values of this field: places, sizes of pools, and hardware. A section
with this mark has it for all of its fields. Fields without this mark must be equal in all deployments."""
WATCHED_DEADLINE = Mark("watched deadline")
"""The field is a deadline, and a healthy run may make no progress until the deadline has passed. `run.stall_timeout_s`
must be longer."""


def in_home(path: str) -> str:
    """Replaces a leading `~` with the home directory. A shell does that only at the start of a word."""
    return str(Path(path).expanduser()) if path.startswith("~") else path


COPY_FIRST = "mount the storage, or copy from it to each machine (aws s3 sync, gcloud storage rsync, hf download),"
"""Advice for a key that only takes a path. docs/decisions/0003-urls.md says why."""


def no_url(advice: str) -> BeforeValidator:
    """Refuses a URL such as `s3://bucket/runs`, which would be a folder `s3:` in the working directory. `advice` says
    what to write instead."""

    def checked(value: object) -> object:
        if isinstance(value, str) and "://" in value:
            raise PydanticCustomError("url", f"is a URL, and only a path works here; {advice}")
        return value

    return BeforeValidator(checked)


def storage_url(value: str | None) -> str | None:
    """Refuses a text that is not a URL of one storage, and one that means other folders than it seems to."""
    if value is None:
        return None
    if "::" in value or not re.fullmatch(r"[a-z0-9+.-]+://\S+", value):
        raise PydanticCustomError("url", "is not the URL of a folder; write e.g. s3://bucket/quickstart")
    if re.search(r"[*?\[\]]", value):  # fsspec would delete and list all folders whose names match
        raise PydanticCustomError("url", "has one of the characters * ? [ ], which stand for other folders, too")
    if re.match(r"(file|local)://[^/]", value):
        raise PydanticCustomError(
            "url", "names a folder below the working directory; write three slashes: file:///mnt/x"
        )
    return value


OnDeadline = Literal["wait", "requeue", "drop", "mask"]
"""The values of `staleness.on_deadline`. `asyncrl.buffer.replay_buffer` implements them."""

HELDOUT = "heldout"
"""Name of the held-out set that every run has: the questions of its own dataset that are not trained."""

NODE = "node"
"""Value of `metrics.host` that stands for the Ray address of each process. Other nodes of the cluster reach the process
at this address."""

WIDTH_KEYS = {"support_ids": "top_k", "top_ids": "logprobs", "top_logprobs": "logprobs"}
"""The columns that have several numbers for each token (`asyncrl.data.specs.WIDE_FIELDS`), and the key of the section
`generator` that says how many."""

BRANCHES_OF_AGENTS = 8
"""Default of `environment.max_branches` for agents."""

KeyPath = tuple[str, ...]
"""A key of the configuration, as the names of its sections and its own name."""


class Section(BaseModel):
    """Base class of every section: immutable, refuses unknown keys, takes descriptions from the fields' docstrings."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        # Without this, an infinite bound in a free mapping (such as algorithm.overrides) would be dumped as null.
        ser_json_inf_nan="constants",
    )


class StopWhenSection(Section):
    """The end of a run before `learner.total_steps`: when a held-out evaluation is good enough. The run then ends as
    after its last step: it publishes, evaluates and saves its last weights, and its state is `finished`."""

    eval: str = HELDOUT
    """Name of the held-out set whose reward counts."""
    reward: float
    """The run ends when an evaluation has at least this mean reward. The evaluation before the first step does not
    count. Training goes on during an evaluation, so the last weights are some steps newer than those that reached the
    reward."""


class RunSection(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}$")] = "quickstart"
    """Name of the run. It is also the name of the run's Ray namespace and of its folder below `run.dir`."""
    # Strict validation of JSON accepts text for a path, but it would refuse the default, which is a Path object.
    dir: Annotated[
        Path,
        Field(validate_default=False),
        no_url("name a folder, and set run.mirror to the URL: the run is copied there"),
        AfterValidator(Path.expanduser),
        PER_DEPLOYMENT,
    ] = Path("runs")
    """Folder in which the run's directory is created. Only the learner writes there."""
    mirror: Annotated[str | None, AfterValidator(storage_url), PER_DEPLOYMENT] = None
    """URL of a folder, such as `s3://bucket/quickstart`, to which the learner copies the run's directory while it
    trains: records every minute, checkpoints when they are complete, and the report at the end. `asyncrl resume URL`
    continues the run on a machine that has nothing of it. Each run needs its own folder. The URL is one of fsspec,
    whose packages also find the keys of the storage (`AWS_ACCESS_KEY_ID`). Unset: no mirror."""
    shared: Annotated[bool, PER_DEPLOYMENT] = False
    """Let other users of the machine read the run's directory (mode 0755). Otherwise only you can (mode 0700): it has
    prompts, completions and checkpoints."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the order of the prompts, of sampling and of all other randomness. Samples of runs with different seeds
    have different seeds."""
    stall_timeout_s: PositiveFloat = 300.0
    """Seconds without progress after which the run ends with an error. Progress is a committed group or a trained
    step."""
    shutdown_grace_s: PositiveFloat = 20.0
    """Seconds that a deployment may take to end cleanly after SIGTERM. A learner evaluates its last weights if more
    than 10 s are left after its checkpoint."""
    log_format: Annotated[Literal["text", "json"], PER_DEPLOYMENT] = "text"
    """Form of the lines of logs. `json`: each line is a JSON object with the time in UTC, level, logger, message, run,
    role and node, and, if they are known, incarnation, replica or rank, and step: for collectors of logs."""
    max_restarts: Annotated[NonNegativeInt, PER_DEPLOYMENT] = 3
    """Number of times within an hour that `asyncrl up`, `resume`, `fork` or `learner` starts again by itself after a
    process of the run has died. Each restart resumes the run from its newest checkpoint. 0 turns restarts off."""
    lost_weights: Annotated[Literal["refuse", "new_run"], PER_DEPLOYMENT] = "refuse"
    """The choice of a learner whose run still exists on the Ray cluster, but cannot go on: the run has ended or failed,
    or its learner was killed before the first checkpoint. `refuse`: the learner ends with an error that names
    `asyncrl down`. `new_run`: the learner ends the rest of that run. Then it resumes the run from its newest
    checkpoint, or begins a new run if there is none. For jobs that a scheduler submits again."""
    stop_when: StopWhenSection | None = None
    """The held-out reward at which the run ends. Unset: it trains `learner.total_steps` steps."""


class TinyModelSection(Section):
    """A tiny Qwen3 model. It is built and warmed up if `model.path` does not exist yet, and again if asyncrl built the
    model there and this section, `model.max_length` or the prompts of the warm-up have changed. The warm-up is
    supervised training on solved examples of the environment, before reinforcement learning starts."""

    seed: NonNegativeInt = 0
    """Seed of the initial weights, of the warm-up batches, and of the tasks of the warm-up if the environment makes
    them. `run.seed` does not change the model, so the seeds of a sweep begin with the same one. The tasks of the
    warm-up may include held-out prompts of the run."""
    hidden_size: PositiveInt = 128
    """Hidden size of the model."""
    layers: PositiveInt = 3
    """Number of decoder layers."""
    heads: PositiveInt = 4
    """Number of attention heads and of key-value heads."""
    head_dim: Annotated[int, Field(ge=32)] = 32
    """Size of an attention head. vLLM on the CPU needs at least 32."""
    chat: bool = False
    """A chat model: with a byte-level BPE tokenizer of 512 tokens, and a chat template with turns and tools. Otherwise
    each character is a token, and there is no template."""
    warmup_steps: NonNegativeInt = 150
    """Maximum number of warm-up steps. 0 turns the warm-up off."""
    warmup_accuracy: Fraction = 0.13
    """Accuracy at which the warm-up begins its last `warmup_decay_steps` steps: the share of the last 128 or more
    examples that were answered exactly. The rest of the task is left to reinforcement learning."""
    warmup_decay_steps: PositiveInt = 20
    """Number of last warm-up steps, over which the learning rate falls to 0. The accuracy still rises in these
    steps."""
    warmup_wrong_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the warm-up examples whose answer is reversed, that is wrong. This imitates a base model, which has read
    right and wrong answers and produces both. Only the reward then tells the model which of the two is wanted."""
    warmup_batch_size: PositiveInt = 64
    """Examples in a warm-up step."""
    warmup_learning_rate: PositiveFloat = 2e-3
    """Peak AdamW learning rate of the warm-up. It rises over the first ten steps and falls over the last
    `warmup_decay_steps`."""


class LoraSection(Section):
    """A LoRA adapter of the policy: two small matrices beside each chosen linear layer (Hu et al. 2021). Only the
    adapter is trained, published and saved. The model at `model.path` stays as it is, and every learner and generator
    reads it there. docs/lora.md has the details."""

    rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Rank of the adapter: the width of its matrices. vLLM supports at most 512."""
    alpha: PositiveInt = 32
    """The adapter's output is multiplied by `alpha` ÷ `rank`."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """The linear layers that have an adapter. `all-linear`: all of them without the output head. A list has ends of
    their names, such as `[q_proj, v_proj]`."""


class ModelSection(Section):
    """The model of the policy."""

    path: Annotated[
        str,
        no_url(f"{COPY_FIRST} and name the model's folder, or name a model of the Hugging Face Hub as owner/name"),
        AfterValidator(in_home),
    ] = "models/tiny-speller"
    """A local directory with a Hugging Face model, or the id of a model on the Hugging Face Hub (`owner/name`). The
    value is a directory if the directory exists, if the value begins with `/`, `./`, `../`, `~` or `models/`, if its
    first part is a folder in the working directory, or if it has more than two parts. With `model.tiny` it must be a
    directory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights in the engine and of the computation in the learner. Use float32 on CPUs."""
    max_length: PositiveInt = 64
    """Maximum length of a sequence (prompt and completion together), tokens."""
    lora: LoraSection | None = None
    """A LoRA adapter. With it, only the adapter is trained. Unset: all weights are trained."""
    tiny: TinyModelSection | None = None
    """A tiny model, which is built at `model.path` if that directory does not exist (`asyncrl model`). A tiny model
    that asyncrl built there earlier is built again if this section, `model.max_length` or the training prompts have
    changed. A directory that holds another model is used as it is. The model is built only if the file or the command
    line that sets `model.path` also sets a key of `model.tiny` (`model.tiny={}` is enough), and never inside
    `run.dir`."""


class Example(Section):
    """A solved example for `data.few_shot`."""

    prompt: str
    """The user's message."""
    answer: str
    """The assistant's message."""


class DatasetSection(Section):
    """A dataset, and how its rows become prompts."""

    dataset: str = "environment"
    """`environment` (the tasks of the environment), `jsonl` (the file `data.path`), `hf` (a dataset of the Hugging Face
    Hub, or files of parquet, JSON, CSV or arrow, with the extra `hf`), or an import path `package.module:callable`. The
    callable returns or yields tasks, or dicts. A row is an object with a `prompt` (a text or a list of messages) or
    `messages`, and an `answer`; its other keys become the task's metadata (docs/tasks.md)."""
    path: (
        Annotated[
            Path,
            no_url(
                f"{COPY_FIRST} and name the file or folder of the data, or, with data.dataset = hf, name a dataset of "
                "the Hub as owner/name"
            ),
            AfterValidator(Path.expanduser),
        ]
        | None
    ) = None
    """File of the `jsonl` dataset, one JSON object a line. For `hf`: the name of a dataset on the Hub (`owner/name`), a
    file, a folder of files, or a folder that `save_to_disk` of the library `datasets` has written. A relative path is
    looked up in the working directory, and then, if a configuration file sets it, in the folder of that file."""
    subset: str | None = None
    """Name of the subset of a dataset on the Hub, which the Hub also calls its configuration. For `hf`."""
    split: str = "train"
    """Split of the dataset, or a part of it, such as `train[:1000]`. For `hf`."""
    columns: dict[Literal["prompt", "messages", "answer"], str | None] = {}
    """The dataset's own names of `prompt`, `messages` and `answer`, e.g. `{prompt: question}`. Dots lead into nested
    objects (`{answer: reward_model.ground_truth}`). `{answer: null}`: the rows have no answer."""
    options: dict[str, Any] = {}
    """Keyword arguments of the callable, for a dataset given by import path. For `hf`: those of
    `datasets.load_dataset`, such as `revision`."""
    prompt_template: str = "{question}"
    """Python format string that makes the prompt. Its fields are `question` and the keys of the task's metadata. Rows
    with messages need the default."""
    system_prompt: str | None = None
    """Message of the system at the beginning of each conversation. Needs a chat template."""
    few_shot: list[Example] = []
    """Solved examples before each question, as messages of the user and the assistant. Needs a chat template."""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """`refuse`: a bad row stops the start of the run. `skip`: bad rows are skipped and counted. A row is bad if it is
    blank, malformed, larger than 1 MiB, or has too many tokens. A row whose finished prompt, answer and metadata are
    equal to an earlier row's is left out and counted with either value."""
    heldout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the questions that are held out for evaluation and never trained. A hash of the question selects
    them."""


class RewardTerm(Section):
    """One of several rewards."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
    """Name of the reward in records, curves and metrics."""
    fn: str
    """A reward as in `environment.reward`, or one of `regex`, `length` and `judge`, which need `options`."""
    weight: float = 1.0
    """Factor of this reward in the sum. It may be negative."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function, e.g. `{pattern: "<answer>.*</answer>"}` for `regex`."""


class McpServer(Section):
    """An MCP server whose tools the model may call: a program, or an address."""

    command: list[str] = []
    """Program and arguments. Each scoring process starts its own. It gets the variables of `environment.secrets`."""
    url: str = ""
    """Address of a server that is already running, such as `http://host:8000/mcp`, instead of `command`."""


class ScoringSection(Section):
    """An environment, which scores completions and may provide the tasks."""

    name: str = "reasoning_gym"
    """`reasoning_gym`, `math`, one of the games of several turns `guess_the_number`, `calculator` and
    `key_value_store`, `verifiers` for the tasksets and `openenv` for the environments of these packages
    (docs/agents.md), or an import path `package.module:callable` that returns an environment."""
    options: dict[str, Any] = {}
    """Keyword arguments of the environment, e.g. `task: spell_backward`."""
    reward: str | None = None
    """Reward function that replaces the scoring of the environment: `exact_match`, `math_verify`, or an import path
    `package.module:callable`. The function takes (task, completion), or (task, completions) for a whole group, and may
    be async (docs/rewards.md). It returns a number, or a dict with a number for each component of the reward, whose sum
    is the reward."""
    rewards: list[RewardTerm] = []
    """Several rewards instead of `reward`. The reward of a completion is their weighted sum. Each is a curve of its own
    in the report, in trackers and in Prometheus, and is written with the samples."""
    agent: str | None = None
    """Agent that replaces the single answer and its scoring: an import path `package.module:callable` of a function
    that takes (session, task), calls the model as often as it likes, and returns the reward (docs/agents.md). It may
    be async."""
    tools: list[str] = []
    """Tools as import paths `package.module:function` (docs/agents.md). The model may call them in several turns. The
    reward scores its last answer. A tool is a function with a docstring, and with parameters whose types JSON can
    express. It may be async."""
    mcp_servers: list[McpServer] = []
    """MCP servers, whose tools the model may call as those of `tools`."""
    tool_timeout_s: PositiveFloat = 10.0
    """Maximum time of one call of a tool, seconds. The model then reads an error."""
    max_turns: PositiveInt = 16
    """Maximum number of calls of the model in an episode of an agent, or of a model with tools."""
    max_branches: PositiveInt | None = None
    """Maximum number of branches of an episode. An agent begins a branch if it does not only append messages to the
    history: it changes or removes earlier ones, or continues an earlier turn twice. All branches are trained, each
    sampled token once. A row has up to this many sequences of `model.max_length` tokens, so `buffer.capacity_bytes` and
    `learner.micro_batch_tokens` must be large enough for them. Unset: 8 with `agent`, `tools` and the built-in
    environments of several turns, otherwise 1. So set it for an environment of your own that runs agents."""
    score_timeout_s: Annotated[PositiveFloat, WATCHED_DEADLINE] = 10.0
    """Maximum time to score one completion, or to run one episode of an agent, seconds. A scoring process that takes
    longer is killed and replaced, and the other completions of its group are scored in the new process. A reward
    function that takes a whole group has this time for each completion of the group."""
    score_workers: PositiveInt = 1
    """Scoring processes of a replica. A process takes waiting groups until their scoring is expected to take 50 ms, one
    after the other; with an async reward it scores up to 64 completions of them at the same time. The processes share
    the completions of a group if the reward takes one completion, is not async, and needs longer than a few
    milliseconds. A process runs the agents of one group at a time, so they need as many processes as
    `generator.max_concurrent_groups`."""
    score_memory_mib: PositiveInt = 2048
    """Maximum memory of reward code in a scoring process, in addition to the memory that its imports took, MiB."""

    @property
    def plays_agents(self) -> bool:
        """Whether episodes have several turns, as far as the configuration shows it. It is False for an environment of
        the user's own without tools, although its code may run agents."""
        if self.agent is not None or self.has_tools:
            return True
        return self.name in OF_SEVERAL_TURNS and not (self.reward or self.rewards)

    @property
    def has_tools(self) -> bool:
        """Whether the model may call tools that asyncrl runs (`tools`, `mcp_servers`)."""
        return bool(self.tools or self.mcp_servers)

    @property
    def tools_key(self) -> str:
        """The key of the setting that names the model's tools, for messages."""
        return "environment.tools" if self.tools else "environment.mcp_servers"

    @property
    def branches(self) -> int:
        """The most branches of an episode (`max_branches`)."""
        if self.max_branches is not None:
            return self.max_branches
        return BRANCHES_OF_AGENTS if self.plays_agents else 1


class EnvironmentSection(ScoringSection):
    """The environment, which scores completions and may provide the tasks."""

    on_error: Literal["mask", "zero", "fail"] = "mask"
    """Treatment of a completion whose reward raises an error, takes too long, ends its process, or does not return a
    finite number. `mask`: it is left out of the loss and of the baseline of its group. `zero`: its reward is 0. `fail`:
    its group fails. A group also fails if too few of its completions have a reward: with `mask` it needs two, or one if
    `algorithm.advantage` does not compare the completions of a group; with `zero` it needs one. Another prompt replaces
    a group that has failed (docs/rewards.md)."""
    special_tokens: Literal["drop", "keep"] = "drop"
    """Whether the completion that a reward gets has the special tokens of the tokenizer, such as `<think>` where this
    is one. `drop`: it has none. `keep`: it has all but the one that ended it. Not for episodes of several turns."""
    secrets: list[VariableName] = []
    """Names of environment variables that reward code needs, such as the key of a judge. They must be set for the
    command that starts the generators. Only their names are in the configuration: one with a value that looks like a
    secret is refused (docs/security.md). The values are not written to any file or log."""


class MixturePart(Section):
    """One of several tasks that a run trains together."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
    """Name of the part in records, curves and metrics."""
    weight: Annotated[int, Field(ge=1, le=1000)] = 1
    """The part's share of the prompts is its weight divided by the sum of all weights."""
    data: DatasetSection | None = None
    """The dataset of the part, with the keys of `data` from `dataset` to `heldout_fraction`. Unset: that of `data`."""
    environment: ScoringSection | None = None
    """The environment and the rewards of the part, with the keys of `environment` from `name` to `score_memory_mib`.
    Unset: those of `environment`."""


class DataSection(DatasetSection):
    """The dataset of prompts."""

    mixture: list[MixturePart] = []
    """Several tasks that are trained together, each with its own dataset and rewards. Their prompts are issued in a
    fixed pattern, so that any part of the run has them in the proportion of the weights (docs/tasks.md)."""
    chat: str = "auto"
    """`auto`: if the tokenizer has a chat template, the prompt is put into the template as a user message, and the
    model writes the answer that follows. `off`: the model gets the prompt unchanged and continues it. Many base models
    have a chat template too. Another word: the template with this name, of a tokenizer that has several; `auto` takes
    the one with the name `default`, and for conversations with tools `tool_use` if there is one. The run prints its
    first prompt exactly as the model gets it; `asyncrl data show` prints several."""
    chat_options: dict[str, Any] = {}
    """Variables of the model's chat template, e.g. `{enable_thinking: false}`."""
    control_tokens: Literal["keep", "refuse"] = "keep"
    """Prompts whose own text contains a control token of the tokenizer, such as `<|im_start|>` or `</s>`: the model
    reads the token, and not the text. `keep`: they are used, and the start names the first one. `refuse`: their rows
    are bad rows (`on_bad_row`). The same holds for the results of tools: `keep` names the first one in the log, and
    with `refuse` the model reads an error instead."""
    max_prompt_tokens: PositiveInt = 48
    """Maximum length of a prompt, tokens. A row with a longer or an empty prompt is a bad row."""
    epochs: PositiveInt | None = None
    """How often each prompt may be issued. Unset: as often as the run needs. With a mixture, the prompts run out when
    those of one part do."""
    shuffle: bool = True
    """Shuffle the prompts again in each epoch, with `run.seed`."""
    drop_last: bool = False
    """When the prompts run out: drop and count the groups that do not fill a step, instead of training a short
    step."""


MOST_REPLICAS = 10_000
"""Largest number of replicas that `generator.autoscale` and `asyncrl scale` accept. More were never tried."""


class AutoscaleSection(Section):
    """A pool of generators that changes its size by itself: a replica is added while the learner waits for groups, and
    one is drained while the staleness limit or a full buffer blocks the replicas (docs/runs.md)."""

    min: PositiveInt = 1
    """Smallest number of replicas of all generator deployments together."""
    max: Annotated[int, Field(ge=1, le=MOST_REPLICAS)]
    """Largest number of replicas of all generator deployments together."""
    dwell_s: Annotated[float, Field(ge=10)] = 120.0
    """Least time between two changes, seconds. Each decision uses measurements of at least two whole steps, which took
    at least this time."""


class GeneratorSection(Section):
    """The generator pool. Each replica is a vLLM engine with its rollout loop."""

    replicas: Annotated[PositiveInt, PER_DEPLOYMENT] = 1
    """Engines that one generator deployment starts."""
    min_replicas: Annotated[PositiveInt, PER_DEPLOYMENT] = 1
    """Minimum number of live engines. With fewer for `replace_timeout_s`, the deployment ends with an error."""
    autoscale: AutoscaleSection | None = None
    """Limits between which the number of replicas follows the speed of the learner. Unset: the number stays, until
    `asyncrl scale` changes it."""
    max_concurrent_groups: Annotated[PositiveInt, PER_DEPLOYMENT] = 16
    """Maximum number of groups that a replica generates at the same time."""
    max_starts_per_s: Annotated[PositiveFloat, PER_DEPLOYMENT] = 200.0
    """Maximum rate at which a replica starts rollouts, groups per second (enforced by asyncio-throttle)."""
    max_completion_tokens: PositiveInt = 16
    """Maximum length of a completion, or of an answer in one turn of an agent, tokens."""
    tool_parser: str | None = None
    """Format in which the model writes tool calls: the name of one of vLLM's tool parsers, e.g. `hermes`. Agents then
    get the calls of their tools (docs/agents.md). Unset: calls stay in the text of the answer."""
    temperature: Temperature = 1.0
    """Sampling temperature. The learner divides its logits by the same value."""
    top_k: PositiveInt | None = None
    """Number of most probable tokens among which each token is sampled. These tokens, its support, are stored with it,
    4 bytes for each. The learner computes log-probs, entropies and gradients of the distribution over them
    (docs/tasks.md). Unset: all tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of the `top_k` tokens, only the most probable ones that together have at least this share of their probability.
    Needs `top_k`."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Only tokens that are at least this share as probable as the most probable token. Needs `top_k`."""
    logprobs: PositiveInt | None = None
    """Number of most probable tokens whose ids and log-probs are stored with each sampled token, 8 bytes for each. They
    are those of the distribution from which the token was sampled: after the temperature and the filters. The axis
    `centering` of a loss reads them, and a loss of your own can (docs/losses.md). Unset: none."""
    seeded: bool | None = None
    """Whether each sample is drawn with a seed of its own, which follows from `run.seed`. An engine then draws the
    samples one by one, which makes short completions slower. Unset: only with `staleness.max_versions: 0`, where equal
    seeds give equal runs. In an asynchronous run, the weights that sample a token depend on the speed of both pools."""
    stop: list[str] = []
    """Strings that end a completion, in addition to the end-of-sequence token."""
    rollout_timeout_s: Annotated[PositiveFloat, WATCHED_DEADLINE] = 120.0
    """Maximum time to generate and score one group, seconds. A group that takes longer fails as INFRA (a failure of the
    system, after which the prompt is tried again)."""
    persist_every_tokens: NonNegativeInt = 0
    """Number of tokens of a sample after which its group is stored as it is so far. If the replica dies, another one
    continues the stored tokens, as long as they are not too old to be trained. If the learner goes back to its
    checkpoint, a finished group with tokens of weights that are lost is generated again, and continues its stored
    tokens of earlier weights. 0: in both cases the group begins again. Each time, all tokens of the group are stored,
    so a value that takes some seconds to generate is enough. The agents of a group begin again, and get the stored
    answers for equal calls (docs/agents.md)."""
    max_data_failures: PositiveInt = 16
    """Number of consecutive groups of the whole pool that fail as DATA, which stops the run. DATA: the cause is the
    prompt or its scoring, and the prompt is not tried again."""
    max_infra_failures: PositiveInt = 3
    """Number of consecutive INFRA failures (see `rollout_timeout_s`) of one replica after which it gets no more prompts
    and is started again. From the second failure on, it waits before its next prompt."""
    stall_timeout_s: Annotated[PositiveFloat, WATCHED_DEADLINE] = 60.0
    """Seconds in which an engine with running requests may generate no token. Then the replica asks it for one token.
    If that takes as long again, the engine is started again."""
    max_restarts: Annotated[NonNegativeInt, PER_DEPLOYMENT] = 10
    """Number of times within an hour that a deployment starts one of its replicas again after its engine or its process
    has failed. A replica that fails more often is given up. 0 turns restarts off."""
    replace_timeout_s: Annotated[PositiveFloat, PER_DEPLOYMENT] = 300.0
    """Seconds in which a deployment may have fewer than `min_replicas` replicas while it starts them again. Unset:
    longer for large models, as `asyncrl config show` prints."""
    wait_for_learner_s: Annotated[NonNegativeFloat, PER_DEPLOYMENT] = 0.0
    """Seconds for which `asyncrl generator` waits for the next learner when SIGTERM has ended the learner before its
    last step. Meanwhile its engines stay, as after a learner that was killed. 0: it ends with the learner."""
    startup_timeout_s: Annotated[PositiveFloat, PER_DEPLOYMENT] = 300.0
    """Maximum time for the start of an engine, seconds. The imports of its process, which take minutes from a cold
    disk, have the same limit. Unset: longer for large models, as `asyncrl config show` prints."""
    kv_cache_gib: Annotated[PositiveFloat | None, PER_DEPLOYMENT] = None
    """Size of the key-value cache of each process of an engine, GiB. Unset: 0.5 on CPUs; on GPUs what
    `gpu_memory_utilization` leaves, which vLLM measures when it starts. Set it if engine and learner share a GPU: the
    measurement fails if the learner's memory changes meanwhile."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1), PER_DEPLOYMENT] = 0.85
    """Share of a GPU's memory that the engine takes. It must be free when the engine starts. With `kv_cache_gib` the
    engine takes what its weights, its cache and its largest step need, and this number is not its limit."""
    tensor_parallel_size: Annotated[PositiveInt, PER_DEPLOYMENT] = 1
    """Processes that share one engine. Each needs its own GPU. On CPUs (`gpus: 0`) each needs its own core, because the
    processes busy-wait for each other and take CPU time from everything else on that core."""
    cpus: Annotated[PositiveFloat, PER_DEPLOYMENT] = 0.5
    """Logical Ray CPUs of a replica."""
    gpus: Annotated[NonNegativeFloat, PER_DEPLOYMENT] = 0.0
    """Ray GPUs of a replica; a whole number if above 1. 0 runs vLLM on the CPU. Below 1, other replicas and ranks may
    run on the same GPU. The number does not divide the GPU's memory: lower `gpu_memory_utilization` to leave room for
    them."""
    node_labels: Annotated[dict[str, str], PER_DEPLOYMENT] = {}
    """Labels that the Ray node of a replica must have, e.g. `{pool: gen}` for nodes started with `ray start --labels
    pool=gen`. Values use the syntax of Ray's label selectors, such as `in(a,b)` or `!c`."""
    enforce_eager: Annotated[bool, PER_DEPLOYMENT] = True
    """Run the engine without graph capture."""
    engine_args: Annotated[dict[str, Any], PER_DEPLOYMENT] = {}
    """Further engine arguments of vLLM, by the names of its `AsyncEngineArgs`, e.g. `{max_num_batched_tokens: 16384}`.
    Arguments that asyncrl sets itself, or with which a guarantee would not hold, are refused with the reason
    (docs/tasks.md)."""


class OptimizerSection(Section):
    """The optimizer and its learning-rate schedule. `betas`, `eps` and `weight_decay` are settings of AdamW."""

    name: str = ADAMW
    """`adamw`, or an import path `package.module:callable` of an optimizer of your own, e.g. `torch.optim:SGD`: the
    callable is called with the trained parameters, `lr` and `options`, and returns a `torch.optim.Optimizer`
    (docs/optimizers.md). If a later file or the command line sets another name, `options`, `betas`, `eps` and
    `weight_decay` of earlier files do not count."""
    options: dict[str, Any] = {}
    """Keyword arguments of the callable that `name` gives by import path, e.g. `{momentum: 0.9}`."""
    learning_rate: NonNegativeFloat = 1e-3
    """Peak learning rate. With 0, the weights never change: the run measures and evaluates fixed weights, and its start
    says so."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment."""
    eps: PositiveFloat = 1e-8
    """ε of AdamW."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Shape of the learning rate after the warm-up, up to `learner.total_steps`."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly to its peak."""
    final_fraction: Fraction = 0.1
    """Learning rate at the last step, as a share of the peak. For `linear` and `cosine`."""
    max_grad_norm: PositiveFloat = 1.0
    """Global norm to which gradients are clipped."""

    @property
    def own(self) -> OwnCallable | None:
        """The optimizer that `name` gives by import path, and its options; None for AdamW."""
        return None if self.name == ADAMW else OwnCallable(path=self.name, options=self.options)


class LearnerSection(Section):
    """The learner pool: one policy, which FSDP2 shards over `ranks` processes."""

    ranks: PositiveInt = 1
    """Processes that train the policy together (FSDP2)."""
    shards: PositiveInt | None = None
    """Ranks that share one copy of the policy (HSDP). It must divide `ranks` and be at least 2. The pool then holds
    `ranks` ÷ `shards` copies, which costs memory. In return, parameters are gathered among `shards` ranks only, for
    example the ranks of one node. Unset: one copy."""
    mixed_precision: Literal["no", "bf16"] | None = None
    """Precision of forward and backward passes; `no` is float32. Weights, optimizer state and gradient sums are always
    float32. Unset: the precision of `model.dtype`."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass, and compute the layer again there. This takes less
    memory and more time."""
    total_steps: PositiveInt = 200
    """Steps of the run."""
    groups_per_step: PositiveInt = 16
    """B: groups in a step. It must be a multiple of `ranks` × `updates_per_step`, and of `critic.ranks` ×
    `updates_per_step` if there is a critic."""
    group_size: PositiveInt = 8
    """G: samples of one prompt."""
    updates_per_step: PositiveInt = 1
    """Optimizer updates in a step. Each update takes an equal share of the step's groups."""
    batching: Literal["padded", "dynamic", "packed"] = "packed"
    """How a rank fills one forward and backward pass. `padded`: `micro_batch_size` sequences, padded to the longest.
    `dynamic`: sequences of similar length, up to `micro_batch_tokens` tokens with padding. `packed`: sequences end to
    end without padding, up to `micro_batch_tokens` tokens. If packed sequences of one pass begin with the same
    tokens, such as the prompt of a group, these tokens are computed once. The results are the same; models whose rows
    cannot be packed are refused (docs/models.md)."""
    micro_batch_size: PositiveInt = 64
    """Sequences in one forward and backward pass of a rank, for `batching: padded`."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens in one forward and backward pass of a rank, for `batching: dynamic` and `packed`."""
    gradient_sync: Literal["update", "micro_batch"] = "update"
    """How often the ranks exchange gradients. `update`: once for each optimizer update; each rank adds up the gradients
    of its micro-batches, which takes the memory of all gradients in float32 on each rank. `micro_batch`: after each
    micro-batch, so that a rank only keeps the gradients of its own shard; slower."""
    weights_digest: Literal["xxh3", "multilinear"] = "xxh3"
    """How ranks compute the digest of their weights, which each step records for the audit. `xxh3`: on the CPU. With
    GPUs each step copies all weights to the host, which was 44 to 84 % of a step. `multilinear`: where the weights are;
    on a CPU four times as slow. It becomes the default on GPUs once a run on a GPU is recorded."""
    optimizer: OptimizerSection = OptimizerSection()
    """The optimizer and its learning-rate schedule."""
    max_nonfinite_steps: PositiveInt = 3
    """Number of consecutive steps with a non-finite loss or gradient that stops the run."""
    collective_timeout_s: Annotated[PositiveFloat, WATCHED_DEADLINE] = 120.0
    """Maximum time for a collective operation among the ranks, seconds."""
    startup_timeout_s: Annotated[PositiveFloat, PER_DEPLOYMENT] = 300.0
    """Maximum time for the ranks to load the model, seconds. Unset: longer for large models, as `asyncrl config show`
    prints."""
    cpus: Annotated[PositiveFloat, PER_DEPLOYMENT] = 0.5
    """Logical Ray CPUs of a rank."""
    gpus: Annotated[NonNegativeFloat, PER_DEPLOYMENT] = 0.0
    """Ray GPUs of a rank; a whole number if above 1. 0 trains on the CPU with gloo. Below 1, engines may run on the
    same GPU. Two ranks of one pool cannot share a GPU, because NCCL refuses it."""
    node_labels: Annotated[dict[str, str], PER_DEPLOYMENT] = {}
    """Labels that the Ray node of a rank must have, e.g. `{pool: learners}` for nodes started with `ray start --labels
    pool=learners`. Values use the syntax of Ray's label selectors, such as `in(a,b)` or `!c`."""
    threads: Annotated[PositiveInt, PER_DEPLOYMENT] = 1
    """Torch threads of a rank on the CPU."""
    groups_logged: NonNegativeInt = 1
    """Groups of each step whose samples are written to `samples/step-N.jsonl` and sent to trackers."""
    logprobs_logged: bool = False
    """Write the log-prob of each completion token with the samples: the log-prob from the engine, and the log-prob
    from the policy if the objective reads it."""


class CriticSection(Section):
    """The critic: a second model with the backbone of the policy, on its own ranks. It is needed for
    `algorithm.advantage: gae` or `vtrace` and for the presets that were published with a critic. The advantages of
    tokens are whitened over the whole step unless `algorithm.advantage` sets another `whiten`. The batching keys of
    `learner` also apply to the critic."""

    ranks: PositiveInt = 1
    """Processes that train the critic together (FSDP2)."""
    optimizer: OptimizerSection = OptimizerSection()
    """The optimizer and its learning-rate schedule, up to `learner.total_steps`."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """γ: discount of a reward for each trained token before it."""
    lam: Fraction = 0.95
    """λ of the policy's advantages, for `gae`. 1 is unbiased; a lower value has less variance and relies more on the
    critic."""
    value_lam: Fraction | None = None
    """λ of the critic's returns, for `gae`. Unset: 1 with `algorithm.loss: vapo`, else `lam`."""
    length_alpha: NonNegativeFloat | None = None
    """α of VAPO, for `gae`: each completion has λ = 1 − 1 / (α · tokens) instead of `lam` in the policy's advantages.
    0: λ is `lam`. Unset: 0.05 with `algorithm.loss: vapo`, else 0."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """How the critic's loss is averaged: over all trained tokens, or first over the tokens of each sequence and then
    over the sequences."""
    value_clip: PositiveFloat | None = 0.2
    """Clip of the value loss: a value has no gradient once it has moved towards its return by more than this, measured
    from its value at the start of the step. Unset: no clip."""
    warmup_steps: NonNegativeInt = 0
    """Number of first steps in which only the critic is trained. They count as steps of the run. The weights and the
    learning-rate schedule of the policy do not advance in them, so that the schedule of the policy ends this many
    steps short."""
    cpus: Annotated[PositiveFloat, PER_DEPLOYMENT] = 0.5
    """Logical Ray CPUs of a rank."""
    gpus: Annotated[NonNegativeFloat, PER_DEPLOYMENT] = 0.0
    """Ray GPUs of a rank; a whole number if above 1. 0 trains on the CPU with gloo. Below 1, engines may run on the
    same GPU. Two ranks of one pool cannot share a GPU, because NCCL refuses it."""
    node_labels: Annotated[dict[str, str], PER_DEPLOYMENT] = {}
    """Labels that the Ray node of a rank must have, e.g. `{pool: critics}` for nodes started with `ray start --labels
    pool=critics`. Values use the syntax of Ray's label selectors, such as `in(a,b)` or `!c`."""


class AlgorithmSection(Section):
    """The objective (the loss) and the advantage estimator."""

    loss: str | dict[str, Any] = "decoupled_icepop"
    """The objective, in one of three forms: the name of a preset (`asyncrl losses` lists them); a mapping that gives
    the axes of an objective, such as `{surrogate: {kind: linear}, anchor: behaviour}` (docs/losses.md); or an import
    path `package.module:callable` of a LossFunction. A mapping gives options to the callable that an import path names:
    `{name: "mine.losses:centred", cap: 3.0}` (docs/losses.md)."""
    overrides: dict[str, Any] = {}
    """Replacements for axes of the preset, e.g. `surrogate: {lo: 0.8, hi: 1.2}`. A mapping replaces only the fields
    that it names. The lists `gates` and `penalties` are replaced as a whole. An entry of the new list takes the fields
    that it does not name from the preset's entry with the same stat or kind. Bounds are ratios; the bounds of a gate
    have the unit of its stat. Infinity is written `.inf`."""
    advantage: str | dict[str, Any] | None = None
    """The advantage estimator: `group_norm`, `group_mean`, `leave_one_out`, `leave_one_out_std`, `batch_std`,
    `reinforce_pp`, `reinforce_pp_baseline`, `maxrl`, `gpg`, `opo`, `oapl`, `gr3`; with `critic` `gae` or `vtrace`; or
    an import path `package.module:callable`. A mapping sets options: `{name: group_norm, eps: 1e-4, eps_in: variance,
    divisor: n, single: raw, whiten: tokens, keep_mean: true}`; docs/losses.md lists them. `reinforce_pp`,
    `reinforce_pp_baseline`, `gae` and `vtrace` can put a KL to the reference inside the reward. The first two also have
    a discount: `{name: reinforce_pp, kl: {beta: 0.01, kind: k1}, gamma: 1.0}`. Unset: the estimator that the preset
    was published with, else `group_norm`."""
    uncorrected: bool = False
    """Allow an objective without off-policy correction with `staleness.max_versions` above 0, as the uncorrected stale
    baseline. Its gradient is biased. The start of the run, its last lines and its report say so. Without effect on
    objectives with a correction."""
    zero_variance: Literal["keep", "mask", "resample"] = "keep"
    """Groups whose rewards are all equal. The compared rewards are those that the estimator compares: after the
    penalties of `overlong` and `gr3`, and each component with `gdpo`. `mask` and `resample` are refused with estimators
    that do not compare the samples of a group, because equal rewards have a gradient there (docs/advantages.md).
    `keep`: they are trained. With a group baseline their advantage is 0, and they count in the denominators of the
    loss. `mask`: they are masked out of the loss. `resample`: they are not trained, and other prompts take their
    places, so that every group of a step teaches something (dynamic sampling of DAPO). They count in the mean
    reward."""
    max_resamples_per_step: PositiveInt | None = None
    """Most groups that `zero_variance: resample` leaves out for one step. Further ones are kept, and counted as
    `filter_limit`. Unset: four times `learner.groups_per_step`."""
    overlong: Literal["keep", "mask", "penalise"] = "keep"
    """Samples that were cut at their length limit. `keep`: they are trained. `mask`: they are masked out of the loss.
    `penalise`: 1 is subtracted from their reward. From the reward of a completion that ends within the last
    `overlong_buffer_tokens` tokens before the limit, a share of 1 is subtracted that rises linearly with its length."""
    overlong_buffer_tokens: PositiveInt = 4
    """Number of last tokens before `generator.max_completion_tokens` over which the penalty rises linearly from 0 to 1.
    For `algorithm.overlong: penalise`."""

    @property
    def loss_name(self) -> str:
        """The name of the preset or the import path in `loss`; `axes` if it gives the axes of an objective."""
        return self.loss if isinstance(self.loss, str) else str(self.loss.get("name", "axes"))


class StalenessSection(Section):
    """The staleness limit: how old training data may be."""

    max_versions: NonNegativeInt = 2
    """η: a token that is trained at step s was generated with the weights of version s − η or newer. 0 is synchronous
    and on-policy."""
    on_deadline: OnDeadline = "wait"
    """Treatment of stragglers: groups that are still generated when enough others are ready for a step, and that would
    miss their deadline if the step began. Only as many stragglers as block the step are treated, those with the fewest
    tokens first. `wait`: the learner waits for them; no bias. `requeue`: their prompts start again at once, on new
    weights, at most `buffer.max_attempts` times; long completions are trained later. `drop`: they are dropped, and
    other prompts replace them; training sees fewer long completions (`length_ratio` shows how much). `mask`: they go
    on, and their tokens that are older than η when they are trained are masked from the loss; their samples that
    finished first lose the most."""


class BufferSection(Section):
    """The replay buffer between the generators and the learner."""

    capacity_groups: PositiveInt | None = None
    """Maximum number of groups in the buffer. Unset: (η + 1) · B, which the staleness rule never exceeds."""
    capacity_bytes: PositiveInt = 2**30
    """Maximum size of the rows of all groups in the buffer, bytes. Reserving a group books the size of the largest
    possible group. Committing the group returns the difference to its real size. The rows of trained groups that the
    newest checkpoint still needs, at most 2 · (η + 1) · B groups, are not counted."""
    heartbeat_timeout_s: Annotated[PositiveFloat, WATCHED_DEADLINE] = 15.0
    """Seconds without a message from a generator after which its tickets expire. Other generators then get the
    prompts of these tickets."""
    max_attempts: PositiveInt = 5
    """Maximum number of attempts at one prompt. After that the prompt counts as failed and another prompt takes its
    place. Attempts on a replica that had to be started again do not count, but with them, a prompt gets at most twice
    this number."""
    call_timeout_s: Annotated[PositiveFloat, WATCHED_DEADLINE] = 30.0
    """Maximum time that one call to the buffer may wait, seconds."""


class DataPlaneSection(Section):
    """The data plane. It carries the rows of finished groups from the generators to the learner's ranks."""

    backend: Literal["object_store", "transfer_queue"] = "object_store"
    """`object_store`: Ray's object store, which needs no installation. `transfer_queue`: the TransferQueue package
    (the extra `transfer-queue`), for sites that operate it already."""
    transfer_queue_storage_units: PositiveInt = 2
    """Storage processes of TransferQueue. Each takes one logical Ray CPU. The controller of TransferQueue takes one
    more."""


class WeightsSection(Section):
    """Publication of weights to the generators."""

    transport: Literal["object_store", "collective", "filesystem", "ipc"] = "object_store"
    """How the weights are transferred. `object_store`: through Ray's object store. `collective`: by broadcast from the
    learner's ranks to the replicas that live at that moment; other replicas get the weights through the object store.
    `filesystem`: through files in `folder`. `ipc`: through the memory of the learner's ranks, which must be on the node
    of the generators."""
    folder: Annotated[Path, no_url("name a folder that the learner and all generators share")] | None = None
    """Folder for `transport: filesystem`, which the learner and all generators must share. It has the newest three
    versions, with `delta` also what they build on, and is empty after the run. Unset: the folder `weights` of the run's
    directory."""
    publish_every_steps: PositiveInt = 1
    """Steps between two published versions, at most η + 1. A version is published earlier if every generator waits for
    it."""
    max_lag_publications: NonNegativeInt = 1
    """Number of publications by which a replica may lag. A replica that lags more starts no new group until it has
    loaded the newest version."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """Treatment of running sequences after a weight update. `recompute`: their KV cache is computed again with the new
    weights. `keep`: they continue with the old KV cache."""
    probe_every_updates: PositiveInt = 1
    """n: the parity probe verifies every n-th weight update of a replica. It compares the engine's log-probs of a few
    sequences with the learner's. Use 1 on CPUs."""
    parity_tolerance_nats: PositiveFloat | None = None
    """In float32, the largest accepted difference between the engine's and the learner's log-prob of a token, nats.
    For sampled tokens it is divided by a `generator.temperature` below 1, as the logits are. Unset: 1e-4."""
    parity_factor: Annotated[float, Field(gt=1)] = 2.0
    """In bfloat16, the largest accepted difference as a multiple of this run's unit. The unit is the difference that
    engine and learner have at the start, because both round: over the first 2,000 on-policy tokens for the learner, and
    over the first probe for a replica."""
    parity_mean_nats: PositiveFloat = 0.2
    """In bfloat16, the largest accepted unit (mean difference), nats."""
    on_parity_failure: Literal["alarm", "stop"] = "stop"
    """Reaction to an engine and a learner that do not agree. `stop`: on the on-policy tokens of a training step, the
    run ends; after a weight update, the replica drops its unverified groups and loads weights again. `alarm`: an error
    is logged, the parity metrics show the difference, and everything goes on."""
    delta: bool = False
    """Send only the weights that have changed. In bfloat16 most weights are equal after a step, because learning rates
    are small. Needs `model.dtype: bfloat16`, and `transport: object_store` or `filesystem`. Each learner rank keeps one
    more copy of what it sends, and a second one for a moment."""
    anchor_every: PositiveInt = 20
    """With `delta`, number of publications after which the weights are sent whole again. A replica that starts fetches
    the last whole weights and all changes since then, which the transport keeps until then."""
    bucket_bytes: PositiveInt = 64 * 2**20
    """Size of the pieces in which weights are transferred, bytes. Models of more than 256 pieces have larger ones."""
    load_timeout_s: Annotated[PositiveFloat, WATCHED_DEADLINE, PER_DEPLOYMENT] = 60.0
    """Maximum time for a replica to fetch a version, to load it, and for a broadcast, seconds each. Weights that arrive
    later are fetched again. A replica that takes longer to load them ends its engine. Unset: longer for large models,
    as `asyncrl config show` prints."""


class CheckpointSection(Section):
    """Checkpoints of the whole run, in `checkpoints/step-N/` of its directory: models, optimizers, buffer and the rows
    of its ready groups. The same command resumes a run from the newest one. The folder `hf/` has the policy for vLLM
    and transformers.

    Training waits while the ranks copy weights and optimizer in memory. The copies are written while the next steps
    run. If a checkpoint is due while the last one is being written, it is postponed until that one is complete."""

    every_steps: NonNegativeInt = 100
    """Steps between two checkpoints. The end of the run always writes one. 0: not by steps."""
    every_minutes: NonNegativeFloat = 0.0
    """Minutes between two checkpoints, also if fewer than `every_steps` steps were trained meanwhile. 0: not by
    time."""
    keep: PositiveInt = 2
    """Number of checkpoints to keep. When a newer checkpoint is complete, older ones are deleted."""
    keep_every: NonNegativeInt = 0
    """Checkpoints of each multiple of so many steps are kept, too, e.g. for evaluations after the run. It is a multiple
    of `every_steps`. A checkpoint that was postponed to another step is not kept. 0: none."""
    keep_best: NonNegativeInt = 0
    """Number of checkpoints with the highest held-out rewards to keep in addition to the newest ones. The evaluation
    that was due after a step belongs to the checkpoint of that step. Of `every_steps` and `eval.every_steps`, one must
    be a multiple of the other, so that checkpoints have evaluations."""
    best_eval: str = HELDOUT
    """Name of the held-out set whose rewards count for `keep_best`."""
    hf: bool = True
    """Whether every checkpoint also has `hf/`: the weights as vLLM and transformers load them. If false, only the
    checkpoint at the end of the run has them."""
    timeout_s: PositiveFloat = 3600.0
    """Maximum time to write a checkpoint, seconds. A checkpoint that takes longer has failed. Training goes on."""


class AuditSection(Section):
    """Files that the run keeps for `asyncrl audit` (docs/guarantees.md). The records for its first four checks are
    always written."""

    keep_weights: Literal["none", "all"] = "none"
    """`all`: keep the float32 weights of every version and the batch of every step in the run's folder `audit/`.
    `asyncrl audit` can then compute every step again and score every trained token under the weights of its version,
    and `asyncrl audit --witness-steps 5` computes steps by a second, plain path. It takes the size of the model for
    every step, and the time to write it. Training also waits for a checkpoint that is being written. For small models.
    With `model.lora`, it also keeps the frozen weights once. Needs `model.dtype: float32`, no
    `learner.mixed_precision: bf16`, `weights.kv_cache: recompute` and a run without a critic."""


class WitnessSection(Section):
    """The witness: plain code that computes the numbers of an update a second time, and compares them with those of the
    learner (docs/guarantees.md)."""

    every_steps: NonNegativeInt = 50
    """Steps between two steps whose update the witness checks. The first step after each start of the learner is also
    checked. 0: none."""
    group_tokens: PositiveInt = 4096
    """Maximum number of tokens that are computed a second time. They are the rows of one group of the step, which is
    drawn at random. If the group has more tokens, only its first rows are taken. A single row with more tokens is never
    taken."""
    on_failure: Literal["stop", "warn"] = "warn"
    """Reaction to an update that is not the one that the configuration describes, or to an evaluation that must be
    greedy and is not. `stop`: the run ends, before the optimizer's step if the gradients are concerned. `warn`: an
    error in the log, and training goes on."""


class EvalSetSection(Section):
    """A further held-out set with a name: other questions, or the same ones with another prompt or reward. All sets are
    evaluated at each evaluation, one after the other."""

    data: DatasetSection | None = None
    """The dataset of the set: keys of `data` from `dataset` to `heldout_fraction` that differ, e.g.
    `{path: hard.jsonl}`. With a `dataset` of its own, `path`, `subset`, `split`, `columns` and `options` are not those
    of `data`. All of the dataset is evaluated, but no question that the run trains."""
    environment: ScoringSection | None = None
    """The environment and the rewards of the set: keys of `environment` from `name` to `score_memory_mib` that differ,
    e.g. `{reward: math_verify}`. With a `name` of its own, `options` and rewards are not those of `environment`."""
    prompts: PositiveInt | None = None
    """Number of prompts: the first ones of the dataset. Unset: `eval.prompts`."""
    samples: PositiveInt | None = None
    """Completions of each prompt. Unset: `eval.samples`."""
    temperature: Temperature | None = None
    """Sampling temperature with several `samples`. Unset: `eval.temperature`."""
    pass_reward: float | None = None
    """Reward from which on a completion counts as right. Unset: `eval.pass_reward`."""


class HeldoutSet(NamedTuple):
    """How a held-out set is evaluated: its own values, and those of `eval` for keys that the set leaves unset."""

    prompts: int
    samples: int
    temperature: float
    pass_reward: float


class EvalSection(Section):
    """Held-out evaluation: completions of prompts that are never trained. They are not in the ledger. One replica keeps
    its weights for an evaluation, so that all of its tokens are of one version."""

    prompts: NonNegativeInt = 128
    """Number of held-out prompts that are evaluated with the first and with the last version. 0: none, and only
    `sets` are evaluated."""
    every_steps: NonNegativeInt = 0
    """Steps between two evaluations while the run trains. 0: only the first and the last version are evaluated. The
    learner and the other replicas go on meanwhile. An evaluation that is due while the last one runs is left out."""
    samples: PositiveInt = 1
    """Completions of each prompt. 1: a greedy one. With more, they are sampled with `temperature`, and pass@k is
    recorded for k = 1, 2, 4, … up to this number."""
    temperature: Temperature = 1.0
    """Sampling temperature of evaluations with several `samples`. They also use `generator.top_k`, `top_p` and
    `min_p`."""
    pass_reward: float = 1.0
    """Reward from which on a completion counts as right, for pass@k."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """How many samples an evaluation generates at once while the run trains, as a share of the most samples that the
    replica generates at once for training (`generator.max_concurrent_groups` × `learner.group_size`). The engine
    decodes both, and so more sequences at once for some time."""
    timeout_s: Annotated[PositiveFloat, WATCHED_DEADLINE] = 120.0
    """Maximum time for the evaluation of one set, seconds."""
    sets: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")], EvalSetSection] = {}
    """Further held-out sets by name. The questions of the run's own dataset that are not trained are the set
    `heldout`."""

    def each_set(self) -> dict[str, HeldoutSet]:
        """Returns how each set is evaluated, by name."""
        own = HeldoutSet(self.prompts, self.samples, self.temperature, self.pass_reward)
        given = {
            name: each.model_dump(include=set(HeldoutSet._fields), exclude_none=True)
            for name, each in self.sets.items()
        }
        return {HELDOUT: own} | {name: own._replace(**values) for name, values in given.items()}


class MetricsSection(Section):
    """Prometheus endpoints, one in each long-lived process, and experiment trackers, which run in the learner."""

    host: str = "127.0.0.1"
    """Address that the endpoints bind. With `--allow-public` it may be another address of this machine, or `node`: the
    Ray address of each process, for pools on several machines."""
    learner_port: Port = 0
    """Port of the learner's endpoint, which also serves the service discovery `/sd`. 0: any free port. If the port is
    taken, the learner warns and uses any free port; `metrics/targets.json` and `asyncrl status` show the port in
    use."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = []
    """Experiment trackers that get the numbers of every step. Each is installed by the extra of the same name. Their
    own settings decide where they write (`WANDB_MODE`, `MLFLOW_TRACKING_URI`, `TRACKIO_SPACE_ID`). The files of
    TensorBoard are in the run's directory."""
    project: str = "asyncrl"
    """Project name that the trackers use for the run."""
    objective_steps_per_hour: PositiveFloat | None = None
    """Steps that the run should train in an hour. A tenth of them may be missing. The alerts AsyncrlStepsBurnFast and
    AsyncrlStepsBurnSlowly fire when more are missing. Unset: they do not fire."""
    objective_training_ratio: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the learner's time in which it should train: neither start, nor wait for groups, nor be in the state
    `other`. The alerts AsyncrlTrainingTimeBurnsFast and AsyncrlTrainingTimeBurnsSlowly fire when it trains less. Unset:
    they do not fire."""


class RaySection(Section):
    """The Ray cluster."""

    address: str | None = None
    """Address of a running cluster. Unset: `asyncrl up` starts a local cluster."""
    placement_timeout_s: PositiveFloat = 120.0
    """Maximum time for Ray to place a process, seconds. After that the start fails and names the missing resources. The
    imports of a process that was placed do not count (`generator.startup_timeout_s`)."""
    object_store_mb: PositiveInt = 512
    """Size of the object store of a local Ray, MiB."""


class Config(Section):
    """The configuration of a run."""

    run: RunSection = RunSection()
    """The run as a whole."""
    model: ModelSection = ModelSection()
    """The model of the policy."""
    data: DataSection = DataSection()
    """The dataset of prompts."""
    environment: EnvironmentSection = EnvironmentSection()
    """The environment, which scores completions."""
    generator: GeneratorSection = GeneratorSection()
    """The generator pool."""
    learner: LearnerSection = LearnerSection()
    """The learner pool."""
    critic: CriticSection | None = None
    """The critic, for advantage estimators that need one."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """The objective and the advantage estimator."""
    staleness: StalenessSection = StalenessSection()
    """The staleness limit."""
    buffer: BufferSection = BufferSection()
    """The replay buffer."""
    data_plane: DataPlaneSection = DataPlaneSection()
    """The data plane, which carries rows from the generators to the learner."""
    weights: WeightsSection = WeightsSection()
    """Publication of weights."""
    checkpoint: CheckpointSection = CheckpointSection()
    """Checkpoints of the whole run."""
    audit: AuditSection = AuditSection()
    """Files that the run keeps for `asyncrl audit`."""
    witness: WitnessSection = WitnessSection()
    """The witness, which computes some updates a second time with plain code."""
    eval: EvalSection = EvalSection()
    """Held-out evaluation."""
    metrics: Annotated[MetricsSection, PER_DEPLOYMENT] = MetricsSection()
    """Prometheus endpoints and experiment trackers."""
    ray: Annotated[RaySection, PER_DEPLOYMENT] = RaySection()
    """The Ray cluster."""

    @property
    def seeds_samples(self) -> bool:
        """Whether each sample has a seed of its own (`generator.seeded`)."""
        return self.staleness.max_versions == 0 if self.generator.seeded is None else self.generator.seeded

    @property
    def has_supports(self) -> bool:
        """Whether the rows have the support of each token: the tokens from which the engine sampled the token
        (`generator.top_k`)."""
        return self.generator.top_k is not None

    @property
    def widths(self) -> dict[str, int]:
        """The columns of this run's rows that have several numbers for each token, and how many: the support of a
        token, and the most likely tokens with their log-probs."""
        widths = {name: getattr(self.generator, key) for name, key in WIDTH_KEYS.items()}
        return {name: width for name, width in widths.items() if width is not None}

    @property
    def most_branches(self) -> int:
        """The largest number of branches that an episode may have in training, over all parts of a mixture."""
        parts = [part.environment for part in self.data.mixture if part.environment is not None]
        return max(scoring.branches for scoring in (self.environment, *parts))

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """The columns of this run's rows that the rows of other runs lack (`asyncrl.data.specs`): those of `widths`,
        and the branches of episodes."""
        return (*self.widths, *(["branch_ids"] if self.most_branches > 1 else []))

    @property
    def most_resamples(self) -> int:
        """The most groups that `algorithm.zero_variance: resample` leaves out for one step; 0 without it."""
        if self.algorithm.zero_variance != "resample":
            return 0
        return self.algorithm.max_resamples_per_step or 4 * self.learner.groups_per_step

    def rank_pools(self) -> dict[str, LearnerSection | CriticSection]:
        """Returns the sections of the pools that have ranks, by name: `learner`, and `critic` if the run has one."""
        return {"learner": self.learner} | ({} if self.critic is None else {"critic": self.critic})


def sections(
    section: type[BaseModel] = Config, path: KeyPath = (), *, of_lists: bool = True
) -> Iterator[tuple[KeyPath, type[BaseModel]]]:
    """Yields (path, class) of each section of the schema, depth first, beginning with the root. With `of_lists`, also
    yields the sections that are elements of a list or values of a mapping. Their path is that of the list or mapping.
    """
    yield path, section
    for name, field in section.model_fields.items():
        if get_origin(field.annotation) in (list, dict) and not of_lists:
            continue
        for option in (field.annotation, *get_args(field.annotation)):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from sections(option, (*path, name), of_lists=of_lists)


@functools.cache
def marked(mark: Mark) -> tuple[str, ...]:
    """Returns the dotted keys of the fields and sections that have `mark`, in the order of the schema."""
    return tuple(
        ".".join((*path, name))
        for path, section in sections(of_lists=False)
        for name, field in section.model_fields.items()
        if mark in field.metadata
    )
