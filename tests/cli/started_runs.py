"""Commands that start runs are tested without starting one."""

from collections.abc import Sequence
from typing import Any

from asyncrl.config.schema import Config


class Started:
    """Takes the place of the function that runs the deployments, and keeps its arguments: `again` and `config`, and
    those that only some commands give in `options`."""

    def __init__(self) -> None:
        self.config = Config()
        self.again: Sequence[str] = ()
        self.options: dict[str, Any] = {}

    def __call__(
        self,
        config: Config,
        prompts: object,
        *,
        command: str,
        address: str | None,
        again: Sequence[str],
        **options: Any,
    ) -> None:
        assert (command, address) == ("up", None)
        self.config, self.again, self.options = config, again, options
