"""The tasks of a run: one configuration for each part of a mixture, and for each named held-out set."""

from asyncrl.config.schema import Config, DatasetSection, ScoringSection

EVAL = "eval/"
"""Beginning of the name of a part that is only evaluated. The parts of a mixture have no such name."""


def part_configs(config: Config) -> dict[str, Config]:
    """Returns a configuration for each part of `data.mixture`, by the part's name. Without a mixture, the only name is
    empty."""
    if not config.data.mixture:
        return {"": config}
    return {part.name: of_part(config, data=part.data, environment=part.environment) for part in config.data.mixture}


def of_part(config: Config, *, data: DatasetSection | None, environment: ScoringSection | None) -> Config:
    """Returns `config` with another dataset and other rewards, and without a mixture. None keeps those of `config`."""
    own_data = {} if data is None else dict(data)
    own_scoring = {} if environment is None else dict(environment)
    return config.model_copy(
        update={
            "data": config.data.model_copy(update=own_data | {"mixture": []}),
            "environment": config.environment.model_copy(update=own_scoring),
        }
    )


def eval_configs(config: Config) -> dict[str, Config]:
    """Returns a configuration for each named held-out set (`eval.sets`), by the name of its part: `eval/NAME`."""
    return {
        f"{EVAL}{name}": of_part(config, data=each.data, environment=each.environment)
        for name, each in config.eval.sets.items()
    }


def all_configs(config: Config) -> dict[str, Config]:
    """Returns the configurations of all parts that a run trains or evaluates, by the part's name."""
    return part_configs(config) | eval_configs(config)


def key_of(part: str) -> str:
    """Returns the beginning of messages about a part, which names the part's key; "" for the only part of a run.

    >>> key_of(""), key_of("sums"), key_of("eval/hard")
    ('', 'data.mixture.sums: ', 'eval.sets.hard: ')
    """
    return f"{section_of(part)}: " if part else ""


def section_of(part: str) -> str:
    """Returns the section of the configuration that has the dataset of a part.

    >>> section_of(""), section_of("sums"), section_of("eval/hard")
    ('data', 'data.mixture.sums', 'eval.sets.hard')
    """
    if part.startswith(EVAL):
        return f"eval.sets.{part.removeprefix(EVAL)}"
    return f"data.mixture.{part}" if part else "data"


def environment_name(config: Config) -> str:
    """Returns the name of the run's environment, for the labels of metrics: the parts of a mixture, the agent's import
    path, `tools`, or `environment.name`. It is `dataset` if the run has a dataset and rewards of its own, and so needs
    no environment.

    >>> environment_name(Config.model_validate({"environment": {"agent": "games:Chess.play"}}))
    'games:Chess.play'
    """
    if config.data.mixture:
        return "+".join(part_configs(config))
    section = config.environment
    if section.agent is not None:
        return section.agent
    if config.data.dataset == "environment":
        return section.name
    if section.has_tools:
        return "tools"
    return "dataset" if section.reward is not None or section.rewards else section.name
