"""The `asyncrl` command, one module a subcommand."""
