"""A Ray that asyncrl starts has a token that no other user can read, and listens only on this machine."""

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.deployment import cluster, local_clusters
from asyncrl.errors import RunError

SetVariable = Callable[[str, str], None]


@pytest.fixture
def set_variable(monkeypatch: pytest.MonkeyPatch) -> SetVariable:
    """Returns the function that sets a variable of the environment."""
    return monkeypatch.setenv


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory, and an environment without variables about tokens."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_first_run_makes_a_token_that_only_its_user_reads(home: Path) -> None:
    local_clusters.require_token()
    token = home / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert len(token.read_text()) == 64
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]


def test_the_second_run_keeps_the_firsts_token(home: Path) -> None:
    local_clusters.require_token()
    token = (home / ".ray" / "auth_token").read_text()
    local_clusters.require_token()
    assert (home / ".ray" / "auth_token").read_text() == token


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o602])
def test_a_token_that_others_may_read_or_change_is_refused(home: Path, mode: int) -> None:
    local_clusters.require_token()
    token = home / ".ray" / "auth_token"
    token.chmod(mode)
    with pytest.raises(RunError, match=rf"has mode {mode:04o}.*`chmod 600 {token}`"):
        local_clusters.require_token()
    with pytest.raises(RunError, match="chmod 600"):
        cluster.join("127.0.0.1:1", namespace="run")
    token.chmod(0o400)
    local_clusters.require_token()


def test_a_token_file_that_ray_does_not_use_may_have_any_mode(home: Path, set_variable: SetVariable) -> None:
    local_clusters.require_token()
    (home / ".ray" / "auth_token").chmod(0o644)
    set_variable("RAY_AUTH_TOKEN", "theirs")
    local_clusters.require_token()
    set_variable("RAY_AUTH_TOKEN", "")
    set_variable("RAY_AUTH_MODE", "disabled")
    local_clusters.check_token_file()


def test_a_token_in_the_environment_is_taken_as_it_is(home: Path, set_variable: SetVariable) -> None:
    set_variable("RAY_AUTH_TOKEN", "theirs")
    local_clusters.require_token()
    assert list(home.iterdir()) == []


def test_a_file_that_the_environment_names_is_taken_and_looked_at(home: Path, set_variable: SetVariable) -> None:
    token = home / "token"
    set_variable("RAY_AUTH_TOKEN_PATH", str(token))
    with pytest.raises(RunError, match=r"RAY_AUTH_TOKEN_PATH = .*no such file"):
        local_clusters.require_token()
    token.write_text("theirs")
    token.chmod(0o600)
    local_clusters.require_token()
    token.chmod(0o666)
    with pytest.raises(RunError, match=f"chmod 600 {token}"):
        local_clusters.require_token()
    assert [path.name for path in home.iterdir()] == ["token"]


def test_a_blank_token_is_refused_before_ray_waits_for_an_answer(home: Path, set_variable: SetVariable) -> None:
    set_variable("RAY_AUTH_TOKEN", " ")
    with pytest.raises(RunError, match="RAY_AUTH_TOKEN is blank"):
        local_clusters.require_token()


def test_no_place_for_a_token_says_what_to_set_instead(home: Path) -> None:
    (home / ".ray").write_text("a file")
    with pytest.raises(RunError, match="set RAY_AUTH_TOKEN"):
        local_clusters.require_token()


def test_an_environment_that_forbids_tokens_is_refused(home: Path, set_variable: SetVariable) -> None:
    set_variable("RAY_AUTH_MODE", "disabled")
    with pytest.raises(RunError, match=r"RAY_AUTH_MODE = 'disabled'.*unset RAY_AUTH_MODE"):
        local_clusters.require_token()


def test_a_ray_at_another_address_than_ours_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: ended.append(True))
    with pytest.raises(RunError, match=r"asked to listen at 127\.0\.0\.1 but listens at 192\.0\.2\.2:6379"):
        cluster.check_own_address("192.0.2.2:6379")
    assert ended == [True]


def test_loopback_is_itself_while_ray_starts_and_joins_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.services import resolve_ip_for_localhost

    seen: list[str] = []
    monkeypatch.setattr(cluster, "_knock", lambda address: None)
    monkeypatch.setattr(cluster.ray, "init", lambda **_: seen.append(resolve_ip_for_localhost("127.0.0.1")))
    monkeypatch.setattr(cluster.ray_constants, "ENABLE_RAY_CLUSTER", True)
    cluster.join("127.0.0.1:1", namespace="run")
    assert seen == ["127.0.0.1"]
    assert cluster.ray_constants.ENABLE_RAY_CLUSTER is True
