"""The tasks of a run: one configuration for each part of a mixture."""

from asyncrl.config.schema import Config, DatasetSection, ScoringSection


def part_configs(config: Config) -> dict[str, Config]:
    """Returns a configuration for each part of `data.mixture`, by the part's name. Without a mixture, the only name is
    empty."""
    if not config.data.mixture:
        return {"": config}
    return {part.name: of_part(config, data=part.data, environment=part.environment) for part in config.data.mixture}


def of_part(config: Config, *, data: DatasetSection | None, environment: ScoringSection | None) -> Config:
    """Returns `config` with another dataset and other rewards, and without a mixture. None keeps those of `config`."""
    own_data = {} if data is None else {name: getattr(data, name) for name in DatasetSection.model_fields}
    scoring = ScoringSection.model_fields
    own_scoring = {} if environment is None else {name: getattr(environment, name) for name in scoring}
    return config.model_copy(
        update={
            "data": config.data.model_copy(update=own_data | {"mixture": []}),
            "environment": config.environment.model_copy(update=own_scoring),
        }
    )


def environment_name(config: Config) -> str:
    """Returns the name of the environment, or the names of the parts of a mixture."""
    return "+".join(part_configs(config)) if config.data.mixture else config.environment.name
