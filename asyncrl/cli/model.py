"""`asyncrl model -c FILE`: builds the tiny model that a configuration describes, unless it exists already."""

from functools import partial

from asyncrl.cli.options import ConfigFiles, Overrides
from asyncrl.cli.preflight import checked_config
from asyncrl.cli.terminal import print_warnings, say


def model(files: ConfigFiles, overrides: Overrides) -> None:
    """Build `model.tiny` at `model.path` and warm it up on the training part of the dataset.

    `asyncrl up` and `asyncrl learner` do this too. Nothing is built if the directory holds a tiny model with the same
    settings and training tasks, or a model that asyncrl did not build.
    """
    config, warnings = checked_config(files, overrides, roles=())
    print_warnings(warnings)

    # This imports torch and transformers, which takes seconds. It comes after all checks that can refuse the command.
    from asyncrl.demo.tiny_model import ensure_model

    say(ensure_model(config, report=partial(say, err=True)))
