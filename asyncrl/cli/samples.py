"""`asyncrl samples RUN`: shows trained samples of a run, with their rewards and the age of each token."""

from typing import Annotated

import typer
from rich.text import Text

from asyncrl.cli.options import RunOrMirror, recorded_run
from asyncrl.deployment.fetching import is_url
from asyncrl.deployment.resuming import SAMPLES
from asyncrl.learner.records import known_data
from asyncrl.views.console import ShownConsole
from asyncrl.views.samples import (
    WORST_OF,
    ColorBy,
    data_in_words,
    legend,
    samples_of,
    shown_sample,
    task_lines,
)


def samples(
    run: RunOrMirror,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Step whose samples are shown. Default: the last one.")
    ] = None,
    worst: Annotated[
        bool,
        typer.Option(
            "--worst",
            help=f"Show the lowest rewards first: of the step, or without --step of the last {WORST_OF} steps.",
        ),
    ] = False,
    most: Annotated[int, typer.Option("-n", metavar="N", min=1, help="Number of samples.")] = 8,
    color: Annotated[
        ColorBy,
        typer.Option(
            help="Colour tokens by their age in versions, by the engine's log-prob minus the policy's, or by whether "
            "they are trained."
        ),
    ] = "age",
    task: Annotated[
        bool,
        typer.Option(
            "--task",
            help="Also show the dataset row of each sample's task, what the reward function got, and how many rows of "
            "the dataset the run leaves out.",
        ),
    ] = False,
) -> None:
    """Show samples that a run has trained: prompt, completion token by token, rewards by component, advantage, and the
    versions of the weights that generated the tokens. The run may still be running.

    The run writes the samples of `learner.groups_logged` groups of each step.
    """
    with recorded_run(run, lambda mirror: mirror.records(SAMPLES)) as folder:
        samples = samples_of(folder, step=step, worst=worst)[:most]
        data = known_data(folder) if task else None
    console = ShownConsole(soft_wrap=True)
    if data is not None:
        for line in data_in_words(data):
            console.print(line)
        if not is_url(run):
            command = f"asyncrl data show -c {folder / 'config.yaml'} --row N"
            console.print(Text(f"a row in full, read by the code that the config names: {command}"))
    console.print(legend(color))
    for sample in samples:
        console.print()
        for line in [*shown_sample(sample, by=color), *(task_lines(sample) if task else ())]:
            console.print(line)
