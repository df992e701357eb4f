"""--allow-public: commands refuse a metrics host that other machines can reach, unless this option is given."""

import pytest
from typer.testing import CliRunner

from asyncrl.cli.main import app

runner = CliRunner()


@pytest.mark.parametrize("command", [["up"], ["learner"], ["generator"], ["config", "check"]], ids=" ".join)
@pytest.mark.parametrize("host", ["node", "10.0.0.7"])
def test_a_host_that_other_machines_reach_is_refused_without_it(command: list[str], host: str) -> None:
    result = runner.invoke(app, [*command, f"metrics.host={host}"])
    assert result.exit_code == 2
    assert f"metrics.host = '{host}': other machines can reach it" in result.stderr
    assert "--allow-public" in result.stderr


@pytest.mark.parametrize("command", [["up"], ["learner"], ["generator"], ["config", "check"]], ids=" ".join)
def test_every_address_is_refused_even_with_it(command: list[str]) -> None:
    result = runner.invoke(app, [*command, "--allow-public", "metrics.host=0.0.0.0"])
    assert result.exit_code == 2
    assert "would answer to every network" in result.stderr


def test_with_it_such_a_host_is_taken() -> None:
    result = runner.invoke(
        app,
        [
            "config",
            "check",
            "--allow-public",
            "metrics.host=node",
            "environment.options.task=chain_sum",
            "model.tiny={}",
        ],
    )
    assert result.exit_code == 0, result.stderr
