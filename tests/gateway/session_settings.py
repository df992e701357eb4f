"""The settings of sessions in tests."""

from typing import Any

from asyncrl.gateway.conversations import SessionSettings


def session_settings(**changes: Any) -> SessionSettings:
    """Returns settings whose limits no test reaches, with `changes`."""
    wide = {"max_calls": 10_000, "max_branches": 1000, "max_length": 10**6, "answer_tokens": 16}
    return SessionSettings(**{"seed": None, "child": 0, "temperature": 1.0} | wide | changes)
