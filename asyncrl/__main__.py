"""Runs the `asyncrl` command: `python -m asyncrl`."""

from asyncrl.cli.main import main

main()
