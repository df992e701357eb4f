"""The `asyncrl` command. Each subcommand has its own module."""
