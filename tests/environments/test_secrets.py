"""Secrets reach scoring processes by name, are redacted in every form, and are checked before a run starts."""

import json
import logging
import os
import pickle
import socket
import ssl
import urllib.error
from urllib.parse import quote

import httpx
import pytest
import requests

from asyncrl.config.schema import EnvironmentSection
from asyncrl.environments.secrets import Secrets, read_secrets, secrets_hint, warn_of_short
from asyncrl.errors import ConfigError

KEY = 'sk-"a\\b/c'


def test_secrets_that_are_not_set_or_empty_are_named_with_what_to_do() -> None:
    section = EnvironmentSection(secrets=["JUDGE_API_KEY", "EMPTY", "THERE"])
    environ = {"EMPTY": "", "THERE": "x"}
    with pytest.raises(ConfigError) as caught:
        read_secrets(section, environ)
    assert "environment.secrets" in str(caught.value)
    first, second = str(caught.value).splitlines()
    assert first.startswith("environment.secrets: JUDGE_API_KEY is not set")
    assert "export JUDGE_API_KEY=" in first
    assert "EMPTY" in second
    assert read_secrets(EnvironmentSection(secrets=["THERE"]), environ).environment == {"THERE": "x"}


@pytest.mark.parametrize("name", ["sk-abc", "KEY=value", "", "1KEY", "A B"])
def test_a_value_in_the_place_of_a_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        EnvironmentSection(secrets=[name])


def test_a_value_is_redacted_in_each_form_in_which_it_shows() -> None:
    secrets = Secrets({"KEY": KEY, "TWO": "first line of two\nsecond line of two\n"})
    for form in (KEY, repr(KEY), json.dumps(KEY), quote(KEY, safe="")):
        shown = secrets.redact(f"before {form} after")
        assert "<KEY>" in shown, form
        assert "sk-" not in shown
    assert secrets.redact("second line of two") == "<TWO>"
    assert secrets.redact("line") == "line"
    assert secrets.longest >= len(KEY)
    assert Secrets().redact("as it is") == "as it is"


def test_of_two_secrets_the_longer_one_is_redacted_first() -> None:
    assert Secrets({"SHORT": "sk-12345", "LONG": "sk-123456"}).redact("sk-123456 sk-12345") == "<LONG> <SHORT>"


def test_values_do_not_show_in_the_repr_and_survive_the_way_to_a_replica() -> None:
    secrets = Secrets({"KEY": KEY})
    assert repr(secrets) == "Secrets(KEY)"
    carried = pickle.loads(pickle.dumps(secrets))
    assert carried.environment == {"KEY": KEY}
    assert carried.redact(KEY) == "<KEY>"


def raised(code: str) -> BaseException:
    try:
        exec(code, {"os": os})
    except Exception as error:
        return error
    raise AssertionError(code)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("os.environ['NOT_THERE']", "NOT_THERE"),
        ("{}['WITHHELD_KEY']", "WITHHELD_KEY"),
        ("try:\n os.environ['NOT_THERE']\nexcept KeyError as e:\n raise RuntimeError('no key') from e", "NOT_THERE"),
        ("try:\n os.environ['NOT_THERE']\nexcept KeyError:\n raise RuntimeError('no key')", "NOT_THERE"),
        ("raise RuntimeError('pass api_key, or set the WITHHELD_KEY environment variable')", "WITHHELD_KEY"),
        ("{}['answer']", None),
        ("{}[7]", None),
        ("raise RuntimeError('the HOME and OTHER_NAME of it')", None),
    ],
)
def test_an_error_for_lack_of_an_environment_variable_is_recognised(code: str, name: str | None) -> None:
    hint = secrets_hint(raised(code), withheld=["WITHHELD_KEY", "HOME"])
    assert hint.startswith(f"; add {name} to environment.secrets") if name else hint == ""


@pytest.mark.parametrize("value", ["1", "0", "yes", "a", "1234567", "1\n2\n3"])
def test_a_short_value_is_not_replaced_and_the_start_says_so(value: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        secrets = read_secrets(EnvironmentSection(secrets=["OFFLINE", "KEY"]), {"OFFLINE": value, "KEY": "12345678"})
        assert not caplog.records, "secrets are read several times in a command"
        warn_of_short(secrets)
    assert secrets.redact(f"{value} and 12345678") == f"{value} and <KEY>"
    assert secrets.environment["OFFLINE"] == value
    [record] = caplog.records
    assert "the values of OFFLINE have fewer than 8 characters" in record.getMessage()


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(111, "refused"),
        socket.gaierror(-2, "Name or service not known"),
        ssl.SSLCertVerificationError("self-signed certificate"),
        TimeoutError("no answer"),
        urllib.error.URLError("no route"),
        httpx.ConnectError("no"),
        httpx.ReadTimeout("late"),
        requests.exceptions.ProxyError("proxy"),
    ],
)
def test_the_error_of_a_connection_lists_the_variables_that_were_withheld(error: Exception) -> None:
    hint = secrets_hint(error, withheld=["EDITOR", "PWD", "SSL_CA", "CORP_PROXY_HOST"])
    assert hint.startswith("; if the connection needs one of the variables CORP_PROXY_HOST, SSL_CA, add it to")
    wrapped = RuntimeError("the judge is away")
    wrapped.__cause__ = error
    assert secrets_hint(wrapped, withheld=["JUDGE_URL"]) != ""
    assert secrets_hint(error, withheld=["EDITOR", "PWD", "RAY_JOB_ID"]) == ""
    many = secrets_hint(error, withheld=[f"KEY_{index}" for index in range(50)])
    assert " and 44 more" in many


@pytest.mark.parametrize("error", [ValueError("no"), FileNotFoundError(2, "no"), ZeroDivisionError()])
def test_another_error_lists_no_variables(error: Exception) -> None:
    assert secrets_hint(error, withheld=["EDITOR"]) == ""
