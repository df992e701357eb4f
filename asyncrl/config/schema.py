"""What a user may set. Every field has its unit in its name or docstring; unknown keys are refused.

`docs/configuration.md` is generated from these classes. Rules over several fields live in `checks.py`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
DecayRate = Annotated[float, Field(ge=0, lt=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def _in_home(path: str) -> str:
    """The user's home directory in the place of a leading `~`, which a shell replaces only at the begin of a word."""
    return str(Path(path).expanduser()) if path.startswith("~") else path


def _off(value: object) -> object:
    """YAML 1.1 reads the word `off` as false."""
    return "off" if value is False else value


class Section(BaseModel):
    """Base of every section: immutable, strict about keys, documented by its fields' docstrings."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # else an infinite bound in free options is dumped as null
    )


class RunSection(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}$")] = "quickstart"
    """Name of the run: its Ray namespace and its folder under `run.dir`."""
    # Strict validation of JSON takes text for a path, but not the Path that is the default: that one is left alone.
    dir: Annotated[Path, Field(validate_default=False), AfterValidator(Path.expanduser)] = Path("runs")
    """Folder that holds the run's directory; only the learner writes there."""
    seed: NonNegativeInt = 0
    """Seed of prompts' order, of sampling and of everything else that is random."""
    stall_timeout_s: PositiveFloat = 300.0
    """Seconds without any progress (no group committed, no step trained) after which the run ends with an error."""
    shutdown_grace_s: PositiveFloat = 20.0
    """Seconds that a deployment gets to end cleanly after SIGTERM."""


class TinyModelSection(Section):
    """A tiny Qwen3 with a character tokenizer, built and warmed up when `model.path` does not exist yet."""

    seed: NonNegativeInt = 0
    """Seed of the initial weights and of the warm-up batches."""
    hidden_size: PositiveInt = 128
    """Width of the model."""
    layers: PositiveInt = 3
    """Number of decoder layers."""
    heads: PositiveInt = 4
    """Number of attention heads; also of key-value heads."""
    head_dim: Annotated[int, Field(ge=32)] = 32
    """Width of an attention head; vLLM on the CPU needs at least 32."""
    warmup_steps: NonNegativeInt = 150
    """Supervised steps, at most, on the environment's own solved examples before reinforcement learning starts."""
    warmup_accuracy: Fraction = 0.13
    """Once this share of the last 128 or more examples was answered exactly, `warmup_decay_steps` are left: the rest
    is left to reinforcement learning."""
    warmup_decay_steps: PositiveInt = 20
    """Last supervised steps, while the learning rate falls to 0; the accuracy still rises meanwhile."""
    warmup_wrong_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the supervised examples whose answer is shown back to front, the wrong way. A base model has read right
    and wrong answers alike and imitates both; which of them is wanted, only the reward tells it."""
    warmup_batch_size: PositiveInt = 64
    """Examples in a supervised step."""
    warmup_learning_rate: PositiveFloat = 2e-3
    """AdamW learning rate of the supervised steps, after ten steps of warm-up and before the decay."""


class ModelSection(Section):
    """The policy's model."""

    path: Annotated[str, AfterValidator(_in_home)] = "models/tiny-speller"
    """Local Hugging Face directory or hub id. A path below `models/` or below another folder that is here, or one that
    begins with `/`, `./` or `../`, is a directory. With `model.tiny` only a directory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights in the engine and of computation in the learner; float32 on CPUs."""
    max_length: PositiveInt = 64
    """Longest sequence, prompt and completion together, tokens."""
    tiny: TinyModelSection | None = None
    """A tiny model, built at `model.path` when nothing is there (`asyncrl model`). It is built only where the file, or
    the command line, that names `model.path` sets something of `model.tiny` too (`model.tiny={}` will do), and never
    in the directory of a run. A directory with another model is used as it is."""


class DataSection(Section):
    """Where prompts come from."""

    dataset: str = "environment"
    """`environment` (its own tasks), `jsonl`, or an import path `package.module:callable` that returns or yields tasks,
    or dicts with the texts `prompt` and `answer`; their other keys become metadata."""
    path: Annotated[Path, AfterValidator(Path.expanduser)] | None = None
    """File of the `jsonl` dataset: one object a line with `prompt` and `answer`."""
    options: dict[str, Any] = {}
    """Keyword arguments of a dataset given by import path."""
    prompt_template: str = "{question}"
    """Python format string that makes the prompt; it sees `question` and the task's metadata."""
    chat: Annotated[Literal["auto", "off"], BeforeValidator(_off)] = "auto"
    """`auto`: a model whose tokenizer has a chat template gets the prompt as a user's message in it, followed by the
    start of the answer. `off`: every model gets the prompt as it is, to be continued. Many base models have a chat
    template too. The run prints its first prompt as the model gets it."""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """What a blank, malformed, huge or duplicate row, or one of too many tokens does: refuse the dataset, or be
    skipped and counted."""
    max_prompt_tokens: PositiveInt = 48
    """Longest prompt, tokens. A longer or empty one is a bad row; where `data.on_bad_row` skips those, it is a DATA
    failure when its turn comes, and replaced."""
    heldout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of questions, chosen by a hash, that are never issued and serve held-out evaluation."""
    epochs: PositiveInt | None = None
    """How often each prompt may be issued; unset: as often as the run needs."""
    shuffle: bool = True
    """Shuffle the prompts anew each epoch, by `run.seed`."""
    drop_last: bool = False
    """When prompts run out: drop the groups that do not fill a step, counted, instead of training a short step."""


class EnvironmentSection(Section):
    """What turns completions into rewards."""

    name: str = "reasoning_gym"
    """`reasoning_gym`, `math`, or an import path `package.module:callable` that makes an environment."""
    options: dict[str, Any] = {}
    """Keyword arguments of the environment, e.g. `task: spell_backward`."""
    reward: str | None = None
    """Replaces the environment's own scoring: `exact_match`, `math_verify`, or an import path `package.module:callable`
    that takes (task, completion), or (task, completions) for a whole group, and may be async (docs/rewards.md)."""
    secrets: list[VariableName] = []
    """Names of environment variables that reward code needs, such as the key of a judge. The command that starts the
    generators must have them. Only their names are in the configuration; their values are in no file or log."""
    score_timeout_s: PositiveFloat = 10.0
    """Seconds that scoring one completion may take, or a scoring process is killed and replaced. A reward that takes a
    whole group has this time for each completion of it."""
    score_workers: PositiveInt = 1
    """Scoring processes of a replica. Each scores one group at a time, or for an async reward all groups that wait, up
    to 64 completions. The completions of a group are shared among them when the reward takes one completion, is not
    async, and takes longer than a few milliseconds."""
    score_memory_mib: PositiveInt = 2048
    """Memory that reward code may take in a scoring process beyond what its imports took, MiB."""


class GeneratorSection(Section):
    """The generator pool: vLLM engines and their rollout loops."""

    replicas: PositiveInt = 1
    """Engines that one generator deployment starts."""
    min_replicas: PositiveInt = 1
    """The deployment ends with an error when fewer of its engines live."""
    max_concurrent_groups: PositiveInt = 16
    """Concurrency slots of a replica: groups that it generates at the same time."""
    max_starts_per_s: PositiveFloat = 200.0
    """Pace of rollout starts of a replica, groups a second, by asyncio-throttle."""
    max_completion_tokens: PositiveInt = 16
    """Longest completion, tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the learner divides its logits by the same."""
    stop: list[str] = []
    """Strings that end a completion, besides the end-of-sequence token."""
    rollout_timeout_s: PositiveFloat = 120.0
    """Seconds that generating and scoring one group may take; then it fails as INFRA."""
    max_data_failures: PositiveInt = 16
    """DATA failures in a row, over the pool, that stop the run."""
    startup_timeout_s: PositiveFloat = 300.0
    """Seconds that an engine may take to start."""
    kv_cache_gib: PositiveFloat = 0.5
    """Size of the key-value cache on CPUs, GiB."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of a GPU's memory that the engine takes."""
    tensor_parallel_size: PositiveInt = 1
    """Processes that share one engine, each on a GPU of its own; on CPUs (`gpus: 0`) each on a core of its own, for
    they wait for each other by spinning, and take the time of whatever else runs there."""
    cpus: PositiveFloat = 0.5
    """Logical Ray CPUs of a replica."""
    gpus: NonNegativeFloat = 0.0
    """Ray GPUs of a replica, whole above 1; 0 runs vLLM on the CPU, and a part of one shares it with other replicas and
    with ranks. That divides nothing by itself: `gpu_memory_utilization` is what leaves room to the others."""
    node_labels: dict[str, str] = {}
    """Labels that the Ray node of a replica must have, e.g. `{pool: gen}` where `ray start --labels pool=gen`
    ran; values in Ray's own words, such as `in(a,b)` or `!c`."""
    enforce_eager: bool = True
    """Run the engine without graph capture."""


class OptimizerSection(Section):
    """AdamW and its schedule."""

    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's ε."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Shape of the learning rate after warm-up, over `learner.total_steps`."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""
    final_fraction: Fraction = 0.1
    """Learning rate at the last step as a share of the peak; for `linear` and `cosine`."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""


class LearnerSection(Section):
    """The learner pool: one FSDP2 policy over `ranks` processes."""

    ranks: PositiveInt = 1
    """Processes that share the policy (FSDP2)."""
    shards: PositiveInt | None = None
    """Ranks that share one copy of the policy (HSDP): a divisor of `ranks`, at least 2. `ranks` ÷ `shards` copies cost
    memory; parameters are then gathered among `shards` ranks only, such as those of one node. Unset: one copy."""
    mixed_precision: Literal["no", "bf16"] | None = None
    """Precision of forward and backward passes, `no` being float32; weights, optimizer and sums of gradients stay
    float32. Unset: that of `model.dtype`."""
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the layer again there: less memory, more time."""
    total_steps: PositiveInt = 200
    """Steps of the run."""
    groups_per_step: PositiveInt = 16
    """B: groups that make one step; a multiple of `ranks`."""
    group_size: PositiveInt = 8
    """G: samples of one prompt."""
    updates_per_step: PositiveInt = 1
    """Optimizer updates within a step; each takes an equal share of the step's groups."""
    batching: Literal["padded", "dynamic", "packed"] = "padded"
    """What goes through a rank's model in one pass: `padded`, `micro_batch_size` sequences, as wide as the longest;
    `dynamic`, as many of like length as `micro_batch_tokens` hold, padding included; `packed`, as many as
    `micro_batch_tokens` hold, end to end without padding. Results are the same."""
    micro_batch_size: PositiveInt = 64
    """Sequences in one forward and backward pass of a rank, for `batching: padded`."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens in one forward and backward pass of a rank, for `batching: dynamic` and `packed`."""
    optimizer: OptimizerSection = OptimizerSection()
    """AdamW and its schedule."""
    max_nonfinite_steps: PositiveInt = 3
    """Steps in a row with a non-finite loss or gradient that stop the run."""
    collective_timeout_s: PositiveFloat = 120.0
    """Seconds that a collective among the ranks may take."""
    startup_timeout_s: PositiveFloat = 300.0
    """Seconds that the ranks may take to load the model."""
    cpus: PositiveFloat = 0.5
    """Logical Ray CPUs of a rank."""
    gpus: NonNegativeFloat = 0.0
    """Ray GPUs of a rank, whole above 1; 0 trains on the CPU over gloo, and a part of one shares it with engines, but
    not with another rank of the same pool: NCCL refuses that."""
    node_labels: dict[str, str] = {}
    """Labels that the Ray node of a rank must have, e.g. `{pool: learners}` where `ray start --labels pool=learners`
    ran; values in Ray's own words, such as `in(a,b)` or `!c`."""
    threads: PositiveInt = 1
    """Torch threads of a rank on the CPU."""
    groups_logged: NonNegativeInt = 1
    """Groups a step whose samples are all written to `samples/step-N.jsonl`, and shown by trackers."""
    logprobs_logged: bool = False
    """Write the log-probs of each completion token with the samples: the engine's, and the policy's where the objective
    reads them."""


class CriticSection(Section):
    """A critic: a second model, of the policy's own backbone, on ranks of its own. It is for `algorithm.advantage: gae`
    or `vtrace`, and the presets that were published with one. Unless `algorithm.advantage` says otherwise, a token's
    advantage is whitened over the whole step. `learner` sets how rows share passes."""

    ranks: PositiveInt = 1
    """Processes that share the critic (FSDP2)."""
    optimizer: OptimizerSection = OptimizerSection()
    """AdamW and its schedule, over `learner.total_steps`."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """γ: what a reward is worth one trained token earlier."""
    lam: Fraction = 0.95
    """λ of the policy's advantages, for `gae`: 1 is unbiased, less has less variance and trusts the critic more."""
    value_lam: Fraction | None = None
    """λ of the critic's returns, for `gae`. Unset: 1 with `algorithm.loss: vapo`, else `lam`."""
    length_alpha: NonNegativeFloat | None = None
    """α of VAPO, for `gae`: the policy's λ is 1 − 1 / (α · tokens) for each completion, instead of `lam`. 0: λ is
    `lam`. Unset: 0.05 with `algorithm.loss: vapo`, else 0."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """The critic's loss is a mean over all trained tokens, or over sequences, each with the mean of its tokens."""
    value_clip: PositiveFloat | None = 0.2
    """A value that moved further than this from the step's start, towards its return, has no gradient. Unset: no
    clip."""
    warmup_steps: NonNegativeInt = 0
    """First steps of the run in which only the critic learns: they count, and the policy stays as it is. Its learning
    rate waits as well, so that at the run's end its schedule is as many steps short."""
    cpus: PositiveFloat = 0.5
    """Logical Ray CPUs of a rank."""
    gpus: NonNegativeFloat = 0.0
    """Ray GPUs of a rank, whole above 1; 0 trains on the CPU over gloo, and a part of one shares it with engines, but
    not with another rank of the same pool: NCCL refuses that."""
    node_labels: dict[str, str] = {}
    """Labels that the Ray node of a rank must have, e.g. `{pool: critics}` where `ray start --labels pool=critics`
    ran; values in Ray's own words, such as `in(a,b)` or `!c`."""


class AlgorithmSection(Section):
    """The objective: a preset, its axes or an import path; and the advantage estimator."""

    loss: str | dict[str, Any] = "decoupled_icepop"
    """Name of a preset (`asyncrl losses` lists them), an objective spelled out axis by axis, as
    `{surrogate: {kind: linear}, anchor: behaviour}`, or an import path `package.module:callable` of a LossFunction."""
    overrides: dict[str, Any] = {}
    """Axes of the preset that are replaced, e.g. `surrogate: {lo: 0.8, hi: 1.2}`. A mapping replaces the fields that it
    names; the lists `gates` and `penalties` are replaced whole, an entry keeping what it does not name of the preset's
    of the same stat or kind. Bounds are ratios, a gate's in the unit of its stat; infinity is `.inf`."""
    advantage: str | dict[str, Any] | None = None
    """The advantage estimator: `group_norm`, `group_mean`, `leave_one_out`, `leave_one_out_std`, `batch_std`,
    `reinforce_pp`, `reinforce_pp_baseline`, `maxrl`, `gpg`, `opo`, `oapl`, `gr3`; with `critic` `gae` or `vtrace`; or
    an import path `package.module:callable`. With options a mapping: `{name: group_norm, eps: 1e-4, eps_in: variance,
    divisor: n, single: raw, whiten: tokens, keep_mean: true}`; docs/advantages.md lists them. `reinforce_pp`,
    `reinforce_pp_baseline`, `gae` and `vtrace` take a KL to the reference inside the reward, and the first two a
    discount: `{name: reinforce_pp, kl: {beta: 0.01, kind: k1}, gamma: 1.0}`. Unset: the one that the preset was
    published with, else `group_norm`."""
    zero_variance: Literal["keep", "mask"] = "keep"
    """Groups whose rewards are all equal: kept (with a group baseline their advantage is 0, and they still count in
    the loss's denominators), or masked out of the loss."""
    overlong: Literal["keep", "mask", "penalise"] = "keep"
    """Samples that were cut at their length limit: kept, masked out of the loss, or penalised: 1 is taken off their
    reward, and less off the rewards of completions that end within `overlong_buffer_tokens` of the limit."""
    overlong_buffer_tokens: PositiveInt = 4
    """Last tokens of `generator.max_completion_tokens` over which the penalty grows linearly from 0 to 1; for
    `algorithm.overlong: penalise`."""


class StalenessSection(Section):
    """How old training data may be."""

    max_versions: NonNegativeInt = 2
    """η: no token trained at step s is from weights older than version s − η. 0 is synchronous and on-policy."""
    on_deadline: Literal["wait"] = "wait"
    """What the learner does when a straggler blocks the lease rule: `wait` until it arrives."""


class BufferSection(Section):
    """The replay buffer between the pools."""

    capacity_groups: PositiveInt | None = None
    """Groups that it holds at most; unset: (η + 1) · B, which admission never exceeds."""
    capacity_bytes: PositiveInt = 2**30
    """Bytes of rows that it holds at most; a reserve books the worst case, the commit refunds the rest."""
    heartbeat_timeout_s: PositiveFloat = 15.0
    """Seconds without a generator's word after which its tickets expire and their prompts go elsewhere."""
    max_attempts: PositiveInt = 5
    """Attempts at one prompt before it counts as failed and another takes its place."""
    call_timeout_s: PositiveFloat = 30.0
    """Seconds that one call to the buffer may wait."""


class DataPlaneSection(Section):
    """What carries the rows of finished groups from the generators to the learner's ranks."""

    backend: Literal["object_store", "transfer_queue"] = "object_store"
    """`object_store`: Ray's, nothing to install; `transfer_queue`: the TransferQueue package (the extra
    `transfer-queue`), for those who operate it already."""
    transfer_queue_storage_units: PositiveInt = 2
    """Storage processes of TransferQueue, one logical Ray CPU each, and one more for its controller."""


class WeightsSection(Section):
    """Publication of weights to the generators."""

    transport: Literal["object_store"] = "object_store"
    """How the bytes travel."""
    publish_every_steps: PositiveInt = 1
    """Steps between two published versions; at most η + 1. Earlier when every generator waits for it."""
    max_lag_publications: NonNegativeInt = 1
    """Publications that a replica may be behind before it starts nothing until it has loaded."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """Running sequences after an update: recomputed on the new weights, or going on with the old cache."""
    probe_every_updates: PositiveInt = 1
    """Every n-th update of a replica is verified by the parity probe; 1 on CPUs."""
    parity_tolerance_nats: PositiveFloat | None = None
    """Largest difference of a token's log-prob between engine and learner; unset: 1e-4 in float32, 5e-2 in
    bfloat16."""
    on_parity_failure: Literal["alarm", "stop"] = "stop"
    """What tokens beyond the tolerance at consumption do: raise the alarm metric, or stop the run."""
    bucket_bytes: PositiveInt = 64 * 2**20
    """Bytes of weights that travel in one piece."""
    load_timeout_s: PositiveFloat = 60.0
    """Seconds that a replica may take to load a version before its engine is ended."""


class CheckpointSection(Section):
    """What a run keeps of its weights: `checkpoints/step-N/hf/` in its directory, for vLLM and transformers.

    Nothing is trained while one is written, which may take `run.stall_timeout_s` at most."""

    every_steps: NonNegativeInt = 100
    """Steps from one checkpoint to the next; 0 writes one at the run's end only, which is always written."""
    keep: PositiveInt = 2
    """Newest checkpoints that stay; older ones are removed when a newer one is whole."""


class EvalSection(Section):
    """Held-out evaluation: greedy, on prompts that are never issued, with admission paused, outside the ledger."""

    prompts: NonNegativeInt = 128
    """Held-out prompts to answer at the first and at the last version; 0 turns it off."""
    timeout_s: PositiveFloat = 120.0
    """Seconds that one evaluation may take."""


class MetricsSection(Section):
    """Prometheus endpoints, one a long-lived process; and experiment trackers, which follow the learner."""

    host: str = "127.0.0.1"
    """Address that the endpoints bind: `127.0.0.1`; with `--allow-public` another one of this machine, or `node`, each
    process's own Ray address, for pools on several machines."""
    learner_port: Port = 0
    """Port of the learner's endpoint and its `/sd`; 0: any free one. Where it is taken, any free one as well, with a
    warning: `metrics/targets.json` and `asyncrl status` say which."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = []
    """Experiment trackers that get every step's numbers, each installed as an extra of its name. Where they write is
    theirs to say (`WANDB_MODE`, `MLFLOW_TRACKING_URI`, `TRACKIO_SPACE_ID`); TensorBoard's files are in the run's
    directory."""
    project: str = "asyncrl"
    """What the trackers file the run under."""


class RaySection(Section):
    """The Ray cluster."""

    address: str | None = None
    """Address of a running cluster; unset: `asyncrl up` starts a local one."""
    placement_timeout_s: PositiveFloat = 120.0
    """Seconds that Ray may take to place a process before the start fails with what is missing."""
    object_store_mb: PositiveInt = 512
    """Object store of a local Ray, MiB."""


class Config(Section):
    """A whole run."""

    run: RunSection = RunSection()
    """The run as a whole."""
    model: ModelSection = ModelSection()
    """The policy's model."""
    data: DataSection = DataSection()
    """Where prompts come from."""
    environment: EnvironmentSection = EnvironmentSection()
    """What turns completions into rewards."""
    generator: GeneratorSection = GeneratorSection()
    """The generator pool."""
    learner: LearnerSection = LearnerSection()
    """The learner pool."""
    critic: CriticSection | None = None
    """The critic, where the advantages need one."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """The objective."""
    staleness: StalenessSection = StalenessSection()
    """How old training data may be."""
    buffer: BufferSection = BufferSection()
    """The replay buffer."""
    data_plane: DataPlaneSection = DataPlaneSection()
    """The carrier of rows."""
    weights: WeightsSection = WeightsSection()
    """Publication of weights."""
    checkpoint: CheckpointSection = CheckpointSection()
    """Checkpoints of the policy."""
    eval: EvalSection = EvalSection()
    """Held-out evaluation."""
    metrics: MetricsSection = MetricsSection()
    """Prometheus endpoints."""
    ray: RaySection = RaySection()
    """The Ray cluster."""
