"""Rules over several fields: each rule refuses only its own mistake, and names key, value, limit and what to do."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.import_path import BUILT_IN_NAMES
from asyncrl.config.load import load_config
from asyncrl.config.row_bytes import worst_case_group_bytes
from asyncrl.config.rules import check_config
from asyncrl.config.schema import Config
from asyncrl.data.specs import BRANCH, SUPPORT, TOP_IDS, TOP_LOGPROBS
from asyncrl.errors import ConfigError

_CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))


def _violations(*overrides: str) -> list[str]:
    config = load_config([], overrides)
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    return str(caught.value).splitlines()


def _warnings(*overrides: str) -> list[str]:
    return check_config(load_config([], overrides))


def test_the_defaults_pass() -> None:
    check_config(Config())


@pytest.mark.parametrize("file", _CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_passes(file: Path) -> None:
    check_config(load_config([file], []))


# First list: overrides with the smallest value beyond a limit. Second list: overrides just within the limit. Text: a
# part of the message.
_LIMITS = [
    (["weights.publish_every_steps=4"], ["weights.publish_every_steps=3"], "staleness.max_versions + 1 = 3"),
    (["staleness.max_versions=0", "weights.publish_every_steps=2"], ["staleness.max_versions=0"], "at most"),
    (
        ["generator.persist_every_tokens=8", "staleness.max_versions=0"],
        ["generator.persist_every_tokens=8", "staleness.max_versions=1"],
        "must be 0 with staleness.max_versions = 0",
    ),
    (["buffer.capacity_groups=15"], ["buffer.capacity_groups=16"], "learner.groups_per_step = 16"),
    (
        ["learner.optimizer.options={momentum: 0.9}"],
        ["learner.optimizer.options={momentum: 0.9}", "learner.optimizer.name=torch.optim:SGD"],
        "is only for an optimizer that learner.optimizer.name gives by import path; remove it",
    ),
    (
        ["learner.optimizer.name=torch.optim:SGD", "learner.optimizer.weight_decay=0.1"],
        ["learner.optimizer.name=torch.optim:SGD", "learner.optimizer.weight_decay=0.0"],
        "is a setting of AdamW, and does nothing with learner.optimizer.name = torch.optim:SGD; remove it (its default",
    ),
    (
        ["staleness.on_deadline=mask", "staleness.max_versions=0"],
        ["staleness.on_deadline=wait", "staleness.max_versions=0"],
        "has no effect with staleness.max_versions = 0",
    ),
    (
        ["staleness.on_deadline=drop", "buffer.capacity_groups=16"],
        ["staleness.on_deadline=drop", "buffer.capacity_groups=17"],
        "must be above learner.groups_per_step = 16",
    ),
    (
        ["staleness.on_deadline=requeue", "buffer.max_attempts=1"],
        ["staleness.on_deadline=requeue", "buffer.max_attempts=2"],
        "at its last attempt is not started again",
    ),
    (["buffer.capacity_bytes=197631"], ["buffer.capacity_bytes=197632"], "197632 ="),
    (
        ["buffer.capacity_bytes=459775", "generator.top_k=8"],
        ["buffer.capacity_bytes=459776", "generator.top_k=8"],
        "(64 tokens × 56 + 8) bytes, with rows of model.max_length = 64 tokens; raise it, or lower generator.top_k",
    ),
    (
        ["buffer.capacity_bytes=459775", "generator.logprobs=4"],
        ["buffer.capacity_bytes=459776", "generator.logprobs=4"],
        "(64 tokens × 56 + 8) bytes, with rows of model.max_length = 64 tokens; raise it, or lower generator.logprobs",
    ),
    (["generator.top_p=0.99"], ["generator.top_p=0.99", "generator.top_k=8"], "set generator.top_k too, or remove"),
    (["generator.min_p=0.01"], ["generator.min_p=0.01", "generator.top_k=8"], "only if their number is limited"),
    (["learner.groups_per_step=15", "learner.ranks=2"], ["learner.ranks=2"], "2 × 1 = 2"),
    (["learner.updates_per_step=3"], ["learner.updates_per_step=4"], "1 × 3 = 3"),
    (
        ["learner.batching=packed", "learner.micro_batch_tokens=63"],
        ["learner.batching=packed", "learner.micro_batch_tokens=64"],
        "model.max_length = 64",
    ),
    (
        ["learner.batching=packed", "learner.micro_batch_tokens=511", "environment.agent=tasks:play"],
        ["learner.micro_batch_tokens=511", "environment.agent=tasks:play", "environment.max_branches=7"],
        "at least model.max_length = 64 × environment.max_branches = 8 = 512 with learner.batching = packed",
    ),
    (
        ["learner.batching=dynamic", "environment.agent=tasks:play"],
        ["learner.batching=dynamic", "environment.agent=tasks:play", "environment.max_branches=1"],
        "learner.batching = dynamic: must be packed with environment.max_branches = 8",
    ),
    (
        ["learner.batching=dynamic", "learner.micro_batch_tokens=1"],
        ["learner.batching=padded", "learner.micro_batch_tokens=1"],
        "raise it",
    ),
    (
        ["learner.ranks=4", "learner.updates_per_step=8"],
        ["learner.ranks=2", "learner.updates_per_step=8"],
        "set it to 32",
    ),
    (["learner.shards=3", "learner.ranks=4"], ["learner.shards=2", "learner.ranks=4"], "set it to 2 or 4"),
    (["learner.shards=8", "learner.ranks=4"], ["learner.shards=4", "learner.ranks=4"], "learner.ranks = 4"),
    (["learner.shards=1", "learner.ranks=4"], ["learner.shards=1"], "at least 2"),
    (
        ["learner.mixed_precision=bf16"],
        ["learner.mixed_precision=bf16", "weights.parity_tolerance_nats=0.1"],
        "model.dtype = float32",
    ),
    (["learner.mixed_precision=bf16"], ["learner.mixed_precision=bf16", "model.dtype=bfloat16"], "set model.dtype"),
    (["weights.parity_factor=3"], ["weights.parity_factor=3", "model.dtype=bfloat16"], "weights.parity_factor: is for"),
    (["weights.parity_mean_nats=1"], ["weights.parity_mean_nats=1", "model.dtype=bfloat16"], "parity_tolerance_nats"),
    (
        ["weights.parity_tolerance_nats=1", "model.dtype=bfloat16"],
        ["weights.parity_tolerance_nats=1"],
        "set weights.parity_factor",
    ),
    (["learner.optimizer.warmup_steps=201"], ["learner.optimizer.warmup_steps=200"], "learner.total_steps = 200"),
    (["audit.keep_weights=all", "model.dtype=bfloat16"], ["audit.keep_weights=all"], "in bfloat16 cannot be computed"),
    (["audit.keep_weights=all", "critic={}"], ["critic={}"], "a run with a critic cannot be computed again"),
    (
        ["audit.keep_weights=all", "weights.kv_cache=keep", "weights.on_parity_failure=alarm"],
        ["weights.kv_cache=keep", "weights.on_parity_failure=alarm"],
        "weights.kv_cache to recompute",
    ),
    (
        ["weights.kv_cache=keep"],
        ["weights.kv_cache=keep", "weights.on_parity_failure=alarm"],
        "set weights.on_parity_failure to alarm",
    ),
    (["weights.delta=true"], ["weights.delta=true", "model.dtype=bfloat16"], "set model.dtype to bfloat16"),
    (
        ["model.lora={}", "weights.delta=true", "model.dtype=bfloat16"],
        ["model.lora={}", "model.dtype=bfloat16"],
        "changes every weight of an adapter",
    ),
    (
        ["model.lora={}", "weights.kv_cache=keep", "weights.on_parity_failure=alarm"],
        ["weights.kv_cache=keep", "weights.on_parity_failure=alarm"],
        "running sequences keep their adapter",
    ),
    (
        ["model.lora={}", "staleness.on_deadline=mask"],
        ["model.lora={}", "staleness.on_deadline=drop"],
        "all tokens of a late group would be masked",
    ),
    (
        ["weights.delta=true", "model.dtype=bfloat16", "weights.transport=ipc"],
        ["weights.delta=true", "model.dtype=bfloat16", "weights.transport=filesystem"],
        "no bytes travel",
    ),
    (
        ["weights.delta=true", "model.dtype=bfloat16", "weights.transport=collective"],
        ["weights.delta=true", "model.dtype=bfloat16", "weights.transport=object_store"],
        "a broadcast keeps no changes",
    ),
    (
        ["weights.delta=true", "model.dtype=bfloat16", "weights.bucket_bytes=1001"],
        ["weights.delta=true", "model.dtype=bfloat16", "weights.bucket_bytes=1002"],
        "must be even",
    ),
    (["weights.folder=w"], ["weights.folder=w", "weights.transport=filesystem"], "leave weights.folder unset"),
    (["critic.ranks=3"], ["critic.ranks=2"], "critic.ranks × learner.updates_per_step = 3 × 1 = 3"),
    (["critic.optimizer.warmup_steps=201"], ["critic.optimizer.warmup_steps=200"], "learner.total_steps = 200"),
    (["critic.warmup_steps=200"], ["critic.warmup_steps=199"], "otherwise the policy is never trained"),
    (["generator.max_completion_tokens=64"], ["generator.max_completion_tokens=63"], "model.max_length = 64"),
    (["data.max_prompt_tokens=64"], ["data.max_prompt_tokens=63"], "model.max_length = 64"),
    (
        ["environment.score_timeout_s=120"],
        ["environment.score_timeout_s=119"],
        "generator.rollout_timeout_s = 120, which includes scoring",
    ),
    (["generator.min_replicas=2"], ["generator.min_replicas=2", "generator.replicas=2"], "generator.replicas = 1"),
    (
        ["generator.autoscale={min: 3, max: 2}", "generator.replicas=3"],
        ["generator.autoscale={min: 3, max: 3}", "generator.replicas=3"],
        "generator.autoscale.min = 3: must be at most generator.autoscale.max = 2",
    ),
    (
        ["generator.autoscale={min: 2, max: 3}", "generator.replicas=4"],
        ["generator.autoscale={min: 2, max: 3}", "generator.replicas=1"],  # other deployments may have more
        "generator.replicas = 4: must be at most generator.autoscale.max = 3",
    ),
    (
        ["generator.wait_for_learner_s=60", "data_plane.backend=transfer_queue"],
        ["generator.wait_for_learner_s=60"],
        "generator.wait_for_learner_s = 60: must be 0 with data_plane.backend = transfer_queue",
    ),
    (
        ["generator.tensor_parallel_size=2", "generator.gpus=1"],
        ["generator.tensor_parallel_size=2", "generator.gpus=2"],
        "must equal generator.gpus = 1",
    ),
    (
        ["generator.tensor_parallel_size=2", "generator.gpus=0.5"],
        ["generator.tensor_parallel_size=2"],
        "or generator.gpus to 0 for CPUs",
    ),
    (
        ["generator.tensor_parallel_size=3", "model.tiny={}"],
        ["generator.tensor_parallel_size=2", "model.tiny={}"],
        "must divide model.tiny.heads = 4",
    ),
    (["data.dataset=jsonl"], ["data.dataset=jsonl", "data.path=x.jsonl"], "needs data.path"),
    (["data.path=x.jsonl"], ["data.dataset=jsonl", "data.path=x.jsonl"], "read only with"),
    (["data.options={a: 1}"], ["data.options={a: 1}", "data.dataset=mine:rows"], "environment.options"),
    (["data.heldout_fraction=0"], ["data.heldout_fraction=0", "eval.prompts=0"], "held-out questions"),
    (
        ["run.stop_when={reward: 0.9}"],
        ["run.stop_when.reward=0.9", "eval.every_steps=20"],
        "because eval.every_steps = 0; set it to a number of steps below learner.total_steps = 200",
    ),
    (
        ["run.stop_when.reward=0.9", "eval.every_steps=200"],
        ["run.stop_when.reward=0.9", "eval.every_steps=199"],
        "is not below learner.total_steps = 200",
    ),
    (
        ["run.stop_when.reward=0.9", "eval.every_steps=20", "eval.prompts=0"],
        ["eval.every_steps=20", "eval.prompts=0"],
        "because eval.prompts = 0; raise eval.prompts",
    ),
    (
        ["run.stop_when={eval: math, reward: 0.9}", "eval.every_steps=20"],
        ["run.stop_when={eval: heldout, reward: 0.9}", "eval.every_steps=20"],
        "there is no such held-out set; the sets are heldout",
    ),
    (
        ["checkpoint.keep_every=30", "checkpoint.every_steps=20"],
        ["checkpoint.keep_every=40", "checkpoint.every_steps=20"],
        "is not a multiple of checkpoint.every_steps = 20",
    ),
    (
        ["checkpoint.keep_best=1"],
        ["checkpoint.keep_best=1", "eval.every_steps=20"],
        "because eval.every_steps = 0; set eval.every_steps",
    ),
    (
        ["checkpoint.keep_best=1", "eval.every_steps=20", "checkpoint.every_steps=0"],
        ["checkpoint.keep_best=0", "eval.every_steps=20", "checkpoint.every_steps=0"],
        "because checkpoint.every_steps = 0",
    ),
    (
        ["checkpoint.keep_best=1", "eval.every_steps=20", "checkpoint.every_steps=30"],
        ["checkpoint.keep_best=1", "eval.every_steps=20", "checkpoint.every_steps=10"],
        "neither of checkpoint.every_steps = 30 and eval.every_steps = 20 is a multiple of the other",
    ),
    (
        ["checkpoint.keep_best=1", "eval.every_steps=20", "eval.prompts=0"],
        ["checkpoint.keep_best=1", "eval.every_steps=20", "eval.prompts=1"],
        "there would be no evaluation, because eval.prompts = 0; raise eval.prompts",
    ),
    (
        ["checkpoint.keep_best=1", "eval.every_steps=20", "checkpoint.best_eval=sums"],
        [
            "checkpoint.keep_best=1",
            "eval.every_steps=20",
            "checkpoint.best_eval=sums",
            "eval.sets.sums={environment: {reward: exact_match}, prompts: 3}",
        ],
        "there is no such held-out set; the sets are heldout",
    ),
    (
        ["eval.sets.heldout={data: {prompt_template: '{question} '}}"],
        ["eval.sets.sums.environment={reward: math_verify}"],
        "is the name of the questions of the run's own dataset",
    ),
    (
        ["eval.sets.sums={samples: 4}"],
        ["eval.sets.sums={environment: {reward: exact_match}, samples: 4}"],
        "would be the set heldout again",
    ),
    (
        ["eval.sets.sums={environment: {reward: exact_match}}", "eval.prompts=0"],
        ["eval.sets.sums={environment: {reward: exact_match}, prompts: 3}", "eval.prompts=0"],
        "eval.sets.sums.prompts: is needed, because eval.prompts = 0",
    ),
    (
        ["eval.sets.sums={data: {prompt_template: '{question} ', heldout_fraction: 0.5}}"],
        ["eval.sets.sums={data: {prompt_template: '{question} '}}", "data.heldout_fraction=0.5"],
        "eval.sets.sums.data.heldout_fraction = 0.5: has no effect",
    ),
    (
        ["eval.sets.sums={data: {dataset: jsonl}}"],
        ["eval.sets.sums={data: {dataset: jsonl, path: x.jsonl}}"],
        "eval.sets.sums: data.dataset = jsonl: needs data.path",
    ),
]


@pytest.mark.parametrize(("beyond", "within", "says"), _LIMITS)
@pytest.mark.fault("F28")
def test_each_limit_is_refused_beyond_and_taken_within(beyond: list[str], within: list[str], says: str) -> None:
    [violation] = _violations(*beyond)
    assert says in violation
    assert any(override.partition("=")[0] in violation for override in beyond)
    _warnings(*within)


@pytest.mark.parametrize(
    "deadline",
    [
        "generator.rollout_timeout_s",
        "weights.load_timeout_s",
        "learner.collective_timeout_s",
        "buffer.heartbeat_timeout_s",
        "buffer.call_timeout_s",
        "eval.timeout_s",
    ],
)
@pytest.mark.fault("F28")
def test_the_watchdog_must_outlast_every_deadline_it_watches_over(deadline: str) -> None:
    [violation] = _violations(f"{deadline}=300")
    assert f"run.stall_timeout_s = 300: must be above {deadline} = 300" in violation
    _warnings(f"{deadline}=299")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{question", "not a valid format string"),
        ("}", "not a valid format string"),
        ("{}", "{} is not the name of a field of a task"),
        ("{0}", "{0} is not the name of a field of a task"),
        ("{question.__class__}", "is not the name of a field of a task"),
        ("{row[word]}", "is not the name of a field of a task"),  # data.prompts supports plain field names only
        ("answer:", "every prompt would be the same"),
        ("{{question}}", "every prompt would be the same"),
    ],
)
@pytest.mark.fault("F28")
def test_a_prompt_template_that_cannot_format_is_refused(template: str, says: str) -> None:
    [violation] = _violations(f"data.prompt_template={template!r}")
    assert says in violation


@pytest.mark.parametrize("template", ["{question}", "{word}>", "{{x}} {n:03d}"])
def test_a_prompt_template_with_named_fields_passes(template: str) -> None:
    _warnings(f"data.prompt_template={template!r}")


@pytest.mark.parametrize("path", ["Qwen/Qwen3-0.6B", "gpt2", "my/models"])
@pytest.mark.fault("F28")
def test_a_tiny_model_is_never_built_in_the_place_of_a_hub_model(path: str) -> None:
    [violation] = _violations(f"model.path={path}", "model.tiny={}")
    assert violation.startswith(f"model.path = {path}: ")
    assert "model.tiny: null" in violation
    assert f"model.path: ./{path}" in violation
    _warnings(f"model.path={path}")
    _warnings(f"model.path={path}", "model.tiny={}", "model.tiny=null")


@pytest.mark.parametrize(
    "path", ["models/tiny-speller", "./Qwen/Qwen3-0.6B", "../x", "/scratch/tiny", "models/mine/tiny", "runs/a/b"]
)
def test_a_tiny_model_is_built_where_a_folder_is_meant_whether_it_exists_or_not(path: str) -> None:
    _warnings(f"model.path={path}", "model.tiny={}")


@pytest.mark.parametrize("key", sorted(BUILT_IN_NAMES.keys() - {"environment.rewards"}))
@pytest.mark.fault("F28")
def test_a_misspelt_built_in_name_says_what_was_meant(key: str) -> None:
    name = BUILT_IN_NAMES[key][-1]
    others = ["data.path=x"] if key == "data.dataset" else []
    lines = _violations(f"{key}={name}x", *others)
    assert f"{key} = {name}x: must be one of" in lines[0]
    assert f"did you mean '{name}'?" in lines[0]


@pytest.mark.parametrize("name", ["judge", "regex", "length"])
@pytest.mark.fault("F28")
def test_a_reward_with_options_is_sent_to_the_list_of_rewards(name: str) -> None:
    [violation] = _violations(f"environment.reward={name}")
    assert f"rewards: [{{name: {name}, fn: {name}, options: {{" in violation
    assert "…" not in violation, "the options are an example that can be pasted"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("{model: m}", "has url = '' and url_variable = ''; set one of them"),
        ("{model: m, url: 'http://a/v1', url_variable: U}", "url_variable = U: must be in environment.secrets"),
        ("{model: m, url: 'localhost:8000/v1'}", "url = localhost:8000/v1: is not an address; begin it with http://"),
        ("{model: m, url: 'http://a/v1', key_variable: OTHER}", "key_variable = OTHER: must be in environment.secrets"),
        ("{model: m, url: 'http://a/v1', prompt: Rate it}", "prompt: has no {completion}"),
        ("{model: m, url: 'http://a/v1', prompt: '{question} {answer}'}", "prompt: has no {completion}"),
        ("{model: m, url: 'http://a/v1', time_limit_s: 100}", "time_limit_s = 100: must be below environment.score_"),
    ],
)
@pytest.mark.fault("F28")
def test_options_with_which_a_judge_cannot_work_are_refused_before_a_start(options: str, problem: str) -> None:
    lines = _violations(
        f"environment.rewards=[{{name: grade, fn: judge, options: {options}}}]", "environment.secrets=[KEY]"
    )
    assert any(line.startswith("environment.rewards.grade.options") and problem in line for line in lines)
    good = "{model: m, url: 'https://a/v1', key_variable: KEY, prompt: 'Rate {completion}', time_limit_s: 5}"
    _warnings(f"environment.rewards=[{{name: grade, fn: judge, options: {good}}}]", "environment.secrets=[KEY]")


@pytest.mark.parametrize("name", ["mine:", ":f", "mine:f()", "a b:c", "mine..x:f"])
@pytest.mark.fault("F28")
def test_a_malformed_import_path_is_refused(name: str) -> None:
    [violation] = _violations(f"environment.reward='{name}'")
    assert "import path like package.module:callable" in violation


def test_all_violations_are_reported_at_once() -> None:
    lines = _violations("weights.publish_every_steps=4", "learner.ranks=3", "generator.min_replicas=2")
    assert [line.partition(" ")[0] for line in lines] == [
        "weights.publish_every_steps",
        "learner.groups_per_step",
        "generator.min_replicas",
    ]


def test_a_group_is_booked_at_its_columns_bytes_for_every_sample() -> None:
    config = load_config([], ["learner.group_size=3", "model.max_length=100"])
    assert worst_case_group_bytes(config) == 3 * (100 * (8 + 8 + 4 + 4) + 8)
    config = load_config([], ["learner.group_size=3", "model.max_length=100", "generator.top_k=20"])
    assert worst_case_group_bytes(config) == 3 * (100 * (8 + 8 + 4 + 4 + 20 * 4) + 8)
    both = ["generator.top_k=20", "generator.logprobs=16"]
    config = load_config([], ["learner.group_size=3", "model.max_length=100", *both])
    assert worst_case_group_bytes(config) == 3 * (100 * (8 + 8 + 4 + 4 + 20 * 4 + 16 * (4 + 4)) + 8)
    overrides = ["learner.group_size=3", "model.max_length=100", "environment.agent=tasks:play"]
    config = load_config([], [*overrides, "environment.max_branches=4"])
    assert worst_case_group_bytes(config) == 3 * (4 * 100 * (8 + 8 + 4 + 4 + 4) + 8)


@pytest.mark.parametrize(
    ("overrides", "branches"),
    [
        ([], 1),
        (["environment.name=guess_the_number"], 8),
        (["environment.name=guess_the_number", "environment.reward=exact_match"], 1),
        (["environment.name=tasks:Own"], 1),
        (["environment.name=tasks:Own", "environment.max_branches=3"], 3),
        (["environment.agent=tasks:play", "environment.max_branches=1"], 1),
        (["data.mixture=[{name: a, environment: {agent: tasks:play, max_branches: 5}}, {name: b}]"], 5),
    ],
    ids=str,
)
def test_rows_have_branches_if_a_part_of_the_run_plays_agents(overrides: list[str], branches: int) -> None:
    config = load_config([], overrides)
    assert config.most_branches == branches
    assert config.extra_columns == ((BRANCH,) if branches > 1 else ())
    assert load_config([], [*overrides, "generator.top_k=2"]).extra_columns[:1] == (SUPPORT,)
    assert load_config([], [*overrides, "generator.logprobs=2"]).extra_columns[:2] == (TOP_IDS, TOP_LOGPROBS)


@pytest.mark.parametrize(
    ("overrides", "silencer", "says"),
    [
        (["model.dtype=bfloat16"], "generator.gpus=1", "bfloat16 on CPUs"),
        (["buffer.capacity_bytes=592895"], "buffer.capacity_bytes=592896", "48 × 12352 bytes"),
        (["buffer.capacity_bytes=592895"], "buffer.capacity_groups=16", "generators may wait for room"),
        (["generator.max_concurrent_groups=49"], "generator.max_concurrent_groups=48", "never use the rest"),
        (
            ["generator.autoscale.max=4"],
            "generator.autoscale.max=3",
            "3 replicas of generator.max_concurrent_groups = 16",
        ),
        (["generator.max_completion_tokens=17"], "data.max_prompt_tokens=47", "longest prompts are cut before"),
        (
            ["learner.optimizer.learning_rate=0"],
            "learner.optimizer.learning_rate=1e-9",
            "learner.optimizer.learning_rate = 0: no step changes the weights of the learner",
        ),
        (
            ["critic={}", "critic.optimizer.learning_rate=0", "algorithm.advantage=gae"],
            "critic.optimizer.learning_rate=1e-9",
            "no step changes the weights of the critic",
        ),
    ],
)
def test_what_runs_but_may_surprise_is_a_warning(overrides: list[str], silencer: str, says: str) -> None:
    assert any(says in warning for warning in _warnings(*overrides))
    assert not any(says in warning for warning in _warnings(*overrides, silencer))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"environment": {"agent": "a:b"}, "data": {"chat": "off"}}, "needs? the model's chat template"),
        ({"environment": {"name": "calculator"}, "data": {"chat": "off"}}, "environment.name = calc"),
        ({"environment": {"agent": "a:b", "reward": "exact_match"}}, "environment.agent: returns the reward itself"),
        ({"environment": {"name": "calculator"}, "model": {"tiny": {}}}, "set model.tiny.chat: true"),
        ({"environment": {"agent": "a:b", "special_tokens": "keep"}}, "special_tokens = keep: has no effect"),
        ({"environment": {"agent": "not a path"}}, "environment.agent = not a path: must be an import path"),
    ],
)
def test_settings_that_agents_cannot_have_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_config(Config.model_validate(settings))


def test_the_answers_of_agents_can_be_stored() -> None:
    check_config(Config.model_validate({"environment": {"agent": "a:b"}, "generator": {"persist_every_tokens": 8}}))


def test_agents_with_fewer_processes_than_groups_are_warned_of() -> None:
    few = {"environment": {"agent": "a:b", "score_workers": 2}, "generator": {"max_concurrent_groups": 4}}
    [warning] = [each for each in check_config(Config.model_validate(few)) if "score_workers" in each]
    assert "raise it to 4" in warning
    enough = {**few, "environment": {"agent": "a:b", "score_workers": 4}}
    assert not [each for each in check_config(Config.model_validate(enough)) if "score_workers" in each]
