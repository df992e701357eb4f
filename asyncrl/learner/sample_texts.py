"""The texts in the records of samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.config.parts import part_configs
from asyncrl.config.schema import Config
from asyncrl.data.answer_text import AnswerText


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Decodes token ids. `tokens`: with the special tokens. `answer`: an answer as the reward of a part (the second
    argument) got it. `last_answer`: what the reward of a part got of the last answer of an episode with tools; None if
    the part has no `environment.tools`."""

    tokens: Callable[[Sequence[int]], str]
    answer: Callable[[Sequence[int], str], str]
    last_answer: Callable[[Sequence[int], str], str | None] = lambda token_ids, part: None

    @classmethod
    def of(cls, tokenizer: Any, config: Config) -> "Texts":
        """Returns the texts of a run."""
        text, parts = AnswerText(tokenizer, stops=config.generator.stop), part_configs(config)

        def answer(token_ids: Sequence[int], part: str) -> str:
            environment = parts[part].environment
            if environment.plays_agents:  # several turns, and what was read between them
                return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))
            return text(token_ids, special_tokens=environment.special_tokens)

        def last_answer(token_ids: Sequence[int], part: str) -> str | None:
            # the tool parser reads the special tokens, and leaves those that are not part of a call
            return text(token_ids, special_tokens="keep") if parts[part].environment.has_tools else None

        return cls(
            tokens=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
            answer=answer,
            last_answer=last_answer,
        )
