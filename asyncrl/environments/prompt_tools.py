"""The tools whose descriptions are part of each prompt (`environment.tools`), as they are known before a run starts."""

import os
from typing import Any

from asyncrl.config.parts import all_configs
from asyncrl.config.schema import Config, EnvironmentSection
from asyncrl.environments.scoring_process import started
from asyncrl.environments.secrets import Secrets
from asyncrl.errors import ConfigError, InfraError

PromptTools = tuple[dict[str, Any], ...]
"""Descriptions of tools, as OpenAI's chat interface has them."""


def prompt_tools(config: Config) -> dict[str, PromptTools]:
    """Returns the descriptions of the tools of each part of the run that has some, by the part's name. Equal
    environments are described once. Raises the errors of `described_tools`."""
    sections = {name: part.environment for name, part in all_configs(config).items() if part.environment.tools}
    keys = {name: section.model_dump_json() for name, section in sections.items()}
    found = {key: described_tools(section) for key, section in {keys[name]: sections[name] for name in keys}.items()}
    return {name: found[key] for name, key in keys.items()}


def described_tools(section: EnvironmentSection) -> PromptTools:
    """Returns the descriptions of `environment.tools`. The tools of MCP servers are not among them, because the servers
    start with the first episode.

    A scoring process makes the descriptions, because it may import the user's functions. Raises ConfigError for a
    function that cannot be a tool, for rewards that cannot be built, and if the process does not start.
    """
    if not section.tools:
        return ()
    secrets = Secrets({name: os.environ[name] for name in section.secrets if name in os.environ})
    try:
        with started(section, secrets=secrets, output=lambda line: None) as process:
            return process.form.tools
    except InfraError as error:
        raise ConfigError(f"{section.tools_key}: {error}") from error
