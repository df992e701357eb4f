"""`python -m asyncrl`: the `asyncrl` command."""

from asyncrl.cli.main import app

app()
