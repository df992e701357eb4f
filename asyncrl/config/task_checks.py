"""Rules that involve several fields of `data`, `environment`, `eval` and `run.stop_when`: see `checks.py`."""

import string
from collections.abc import Iterator

from asyncrl.config.import_path import is_import_path, malformed
from asyncrl.config.parts import all_configs, key_of, part_configs
from asyncrl.config.schema import HELDOUT, Config, DatasetSection, ScoringSection


def task_violations(config: Config) -> Iterator[str]:
    """Yields the violations of the rules about datasets and rewards, of each part and of each held-out set."""
    names = [part.name for part in config.data.mixture]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"data.mixture: has {names.count(name)} parts with the name {name}; give each its own name"
    for name, part in all_configs(config).items():
        for rule in (_data_violations, _rewards_violations, _judge_violations, _agent_violations, _tools_violations):
            yield from (f"{key_of(name)}{violation}" for violation in rule(part))
        if part.environment.score_timeout_s >= part.generator.rollout_timeout_s:
            yield (
                f"{key_of(name)}environment.score_timeout_s = {part.environment.score_timeout_s:g}: must be "
                f"below generator.rollout_timeout_s = {part.generator.rollout_timeout_s:g}, which includes scoring; "
                "lower it, or raise generator.rollout_timeout_s"
            )
    yield from _unused(config)
    if config.eval.prompts > 0 and not any(part.data.heldout_fraction for part in part_configs(config).values()):
        yield (
            f"eval.prompts = {config.eval.prompts}: needs held-out questions, but data.heldout_fraction = 0 holds out "
            "none; raise data.heldout_fraction, or set eval.prompts to 0"
        )


def _unused(config: Config) -> Iterator[str]:
    """Yields the settings of `data` and `environment` that all parts of a mixture replace."""
    for section, fields, replaced in (
        ("data", DatasetSection.model_fields, [part.data for part in config.data.mixture]),
        ("environment", ScoringSection.model_fields, [part.environment for part in config.data.mixture]),
    ):
        if not replaced or None in replaced:
            continue
        for name, field in fields.items():
            value = getattr(getattr(config, section), name)
            if value != field.get_default(call_default_factory=True):
                yield (
                    f"{section}.{name} = {value}: has no effect, because each part of data.mixture has its own "
                    f"`{section}`; move it into the parts"
                )


def _data_violations(config: Config) -> Iterator[str]:
    data = config.data
    if data.dataset == "jsonl" and data.path is None:
        yield "data.dataset = jsonl: needs data.path, the file to read; set data.path"
    if data.dataset == "hf" and data.path is None:
        yield "data.dataset = hf: needs data.path, a dataset's name on the Hub, a file or a folder; set data.path"
    if data.dataset not in ("jsonl", "hf") and data.path is not None:
        yield (
            f"data.path = {data.path}: is read only with data.dataset = jsonl or hf; set data.dataset, or remove "
            "data.path"
        )
    if data.options and data.dataset != "hf" and not is_import_path(data.dataset):
        yield (
            "data.options: is only for data.dataset = hf, and for a dataset given by import path; move options of the "
            "environment to environment.options, or remove data.options"
        )
    for key, default in (("subset", None), ("split", "train")):
        if data.dataset != "hf" and getattr(data, key) != default:
            yield f"data.{key} = {getattr(data, key)}: is only for data.dataset = hf; remove it"
    if data.columns and data.dataset == "environment":
        yield "data.columns: has no effect, because the environment itself makes the tasks; remove it"
    for key in ("system_prompt", "few_shot", "chat_options"):
        if data.chat == "off" and getattr(data, key):
            yield f"data.{key}: needs the model's chat template, which data.chat: off removes; remove one of the two"
    yield from _prompt_template(config.data.prompt_template)


def eval_violations(config: Config) -> Iterator[str]:
    """Rules about held-out sets, and about what needs evaluations: `checkpoint.keep_best` and `run.stop_when`."""
    for name, each in config.eval.sets.items():
        key = f"eval.sets.{name}"
        if name == HELDOUT:
            yield f"{key}: is the name of the questions of the run's own dataset that are not trained; rename it"
        if each.data is None and each.environment is None:
            yield f"{key}: would be the set {HELDOUT} again; set its data or its environment, or remove it"
        if config.data.mixture and each.data is None:
            yield f"{key}: needs data of its own, because the run's questions are those of data.mixture; set its data"
        if each.prompts is None and config.eval.prompts == 0:
            yield f"{key}.prompts: is needed, because eval.prompts = 0; set it"
        if each.data is not None and each.data.heldout_fraction != config.data.heldout_fraction:
            yield (
                f"{key}.data.heldout_fraction = {each.data.heldout_fraction}: has no effect, because all questions of "
                "the set that the run does not train are evaluated; remove it"
            )
    yield from _keep_best(config)
    yield from _stop_when(config)


def _no_evaluations(config: Config, name: str, *, key: str, needed_by: str) -> Iterator[str]:
    """Yields a violation if the held-out set `name`, the value of `key`, is never evaluated."""
    sets = config.eval.each_set()
    if name not in sets:
        yield f"{key} = {name}: there is no such held-out set; the sets are {', '.join(sets)}"
    elif sets[name].prompts == 0:
        yield f"{needed_by}: there would be no evaluation, because eval.prompts = 0; raise eval.prompts"


def _stop_when(config: Config) -> Iterator[str]:
    stop, every_steps = config.run.stop_when, config.eval.every_steps
    if stop is None:
        return
    yield from _no_evaluations(config, stop.eval, key="run.stop_when.eval", needed_by="run.stop_when")
    if every_steps == 0:
        yield (
            "run.stop_when: there would be no evaluation during training, because eval.every_steps = 0; set it to a "
            f"number of steps below learner.total_steps = {config.learner.total_steps}"
        )
    elif every_steps >= config.learner.total_steps:
        yield (
            "run.stop_when: there would be no evaluation during training, because eval.every_steps = "
            f"{every_steps} is not below learner.total_steps = {config.learner.total_steps}; lower eval.every_steps"
        )


def _keep_best(config: Config) -> Iterator[str]:
    checkpoint, evals = config.checkpoint.every_steps, config.eval.every_steps
    if not config.checkpoint.keep_best:
        return
    named = f"checkpoint.keep_best = {config.checkpoint.keep_best}"
    yield from _no_evaluations(config, config.checkpoint.best_eval, key="checkpoint.best_eval", needed_by=named)
    zero = {"eval.every_steps": evals, "checkpoint.every_steps": checkpoint}
    for key in (key for key, value in zero.items() if value == 0):
        yield f"{named}: the checkpoints of a run would have no evaluations, because {key} = 0; set {key}"
    if checkpoint and evals and checkpoint % evals and evals % checkpoint:
        yield (
            f"{named}: most checkpoints would have no evaluation, because neither of checkpoint.every_steps = "
            f"{checkpoint} and eval.every_steps = {evals} is a multiple of the other; set both to the same number"
        )


def _prompt_template(template: str) -> Iterator[str]:
    shown = f"data.prompt_template = {template!r}"
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        yield f"{shown}: is not a valid format string ({error}); write {{{{ and }}}} for literal braces"
        return
    unnamed = [name for name in fields if not name.isidentifier()]
    if unnamed:
        yield (
            f"{shown}: {{{unnamed[0]}}} is not the name of a field of a task; write a plain name without dots and "
            "brackets, e.g. {question}"
        )
    elif not fields:
        yield f"{shown}: has no field, so every prompt would be the same; add a field, e.g. {{question}}"


def agent_warnings(config: Config) -> Iterator[str]:
    """Yields a warning if the agents of a part have too few processes. Whether the user's own environment runs agents
    is not known before it is built."""
    slots = config.generator.max_concurrent_groups
    for name, part in all_configs(config).items():
        workers = part.environment.score_workers
        if _agent(part) and workers < slots:
            yield (
                f"{key_of(name)}environment.score_workers = {workers}: the agents of a group run in one process, so "
                f"only {workers} of generator.max_concurrent_groups = {slots} groups run at once; raise it to {slots}"
            )


def _agent(config: Config) -> str:
    """Returns the setting that names an agent, `key = value`; empty if there is none."""
    environment = config.environment
    if environment.agent is not None:
        return f"environment.agent = {environment.agent}"
    if environment.has_tools:
        return environment.tools_key
    return f"environment.name = {environment.name}" if environment.plays_agents else ""


def _judge_violations(config: Config) -> Iterator[str]:
    environment = config.environment
    for term in environment.rewards:
        if term.fn != "judge":
            continue
        key, options = f"environment.rewards.{term.name}.options", term.options
        url, url_variable = (str(options.get(name, "")) for name in ("url", "url_variable"))
        if bool(url) == bool(url_variable):
            yield (
                f"{key}: has url = {url!r} and url_variable = {url_variable!r}; set one of them: the address of the "
                "judge, or the environment variable that has it"
            )
        if url and not url.startswith(("http://", "https://")):
            yield f"{key}.url = {url}: is no address; write http:// or https:// before it, as in http://host:8000/v1"
        for name in ("key_variable", "url_variable"):
            variable = options.get(name)
            if variable and variable not in environment.secrets:
                yield (
                    f"{key}.{name} = {variable}: must be in environment.secrets, because reward code sees no other "
                    "variables; add it there"
                )
        prompt = options.get("prompt")
        if isinstance(prompt, str) and "{completion}" not in prompt:
            yield f"{key}.prompt: has no {{completion}}, so the judge would not see the answer; write it there"
        limit_s = options.get("time_limit_s")
        if isinstance(limit_s, int | float) and limit_s >= environment.score_timeout_s:
            yield (
                f"{key}.time_limit_s = {limit_s:g}: must be below environment.score_timeout_s = "
                f"{environment.score_timeout_s:g}, which ends the request before; lower it, or raise the other"
            )


def _agent_violations(config: Config) -> Iterator[str]:
    what = _agent(config)
    if not what:
        return
    if config.environment.agent and (problem := malformed(config.environment.agent, key="environment.agent")):
        yield problem
    if config.data.chat == "off":
        yield f"{what}: its turns need the model's chat template, which data.chat: off removes; remove data.chat"
    if config.model.tiny is not None and not config.model.tiny.chat:
        yield f"{what}: its turns need a model with a chat template; set model.tiny.chat: true"


def _tools_violations(config: Config) -> Iterator[str]:
    environment = config.environment
    if environment.plays_agents and environment.special_tokens != "drop":
        yield (
            f"environment.special_tokens = {environment.special_tokens}: has no effect on episodes of several turns, "
            "whose answers are messages; remove it"
        )
    if not environment.has_tools:
        return
    key = environment.tools_key
    if config.generator.tool_parser is None:
        yield (
            f"{key}: needs generator.tool_parser, the format in which the model writes calls of tools, such as hermes; "
            "without it, calls stay in the text of an answer"
        )
    if environment.agent is not None:
        yield f"{key}: has no effect with environment.agent, which makes its own calls; remove one of the two"
    for path in environment.tools:
        if problem := malformed(path, key="environment.tools"):
            yield problem
    for server in environment.mcp_servers:
        if bool(server.command) == bool(server.url):
            yield (
                f"environment.mcp_servers: a server has command = {server.command} and url = {server.url!r}; set one "
                "of the two"
            )


def _rewards_violations(config: Config) -> Iterator[str]:
    rewards = config.environment.rewards
    if config.environment.agent is not None and (rewards or config.environment.reward is not None):
        yield (
            "environment.agent: returns the reward itself, so environment.reward and environment.rewards have no "
            "effect; remove them"
        )
    if rewards and config.environment.reward is not None:
        yield "environment.reward: has no effect with environment.rewards; add it there, or remove one of the two"
    for term in rewards:
        if problem := malformed(term.fn, key="environment.rewards"):
            yield f"environment.rewards.{term.name}.fn{problem.removeprefix('environment.rewards')}"
    names = [term.name for term in rewards]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"environment.rewards: has {names.count(name)} rewards with the name {name}; give each its own name"
