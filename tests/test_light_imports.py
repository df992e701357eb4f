"""Modules and commands that import none of the large libraries. So commands answer within a second, the state machines
can be tested without torch, and Ray does not read RAY_AUTH_MODE before asyncrl has set it.

One process imports all of them, one after the other, and looks after each one at what is imported by then. The modules
that may import the least come first.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

import asyncrl.buffer
import asyncrl.common
import asyncrl.config

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
LARGE = ("torch", "ray", "vllm", "transformers", "accelerate", "numpy")
HEAVY = ("torch", "ray", "vllm")
REFUSED = {
    "up": "generator.replcas=2",
    "learner": "algorithm.loss=dapo",
    "generator": "weights.publish_every_steps=9",
}
"""Settings that cannot be, by the command that refuses them."""


def modules_of(package: ModuleType) -> list[str]:
    """Returns the modules of a package."""
    assert package.__file__
    stems = sorted(path.stem for path in Path(package.__file__).parent.glob("*.py"))
    return [package.__name__] + [f"{package.__name__}.{stem}" for stem in stems if stem != "__init__"]


def command(*arguments: str, code: int = 0) -> str:
    """Returns statements that run a command and check its exit code."""
    call = f"from asyncrl.cli.main import app\ntry:\n    app({list(arguments)!r})\nexcept SystemExit as end:\n"
    return f"{call}    assert (end.code or 0) == {code}, end.code"


def imports(*modules: str) -> str:
    return f"import {', '.join(modules)}"


PACKAGE = "import asyncrl\ndir(asyncrl), asyncrl.Config(), asyncrl.load_config, asyncrl.ConfigError, asyncrl.StepRecord"
COLUMNS = (
    "import asyncrl.data, asyncrl.data.packing, asyncrl.data.prompts, asyncrl.data.sharding\n"
    "from asyncrl.data import SequencePackingArgs, get_packer"
)
CASES: dict[str, tuple[str, Sequence[str]]] = {
    "help": (command("--help"), (*LARGE, "asyncrl.cli.config", "asyncrl.cli.doctor", "pydantic")),
    # benchmarks/gpu measures models on machines that have torch and transformers only.
    "objective": (imports("asyncrl.algorithms.objective"), (*LARGE, "pydantic")),
    "asyncrl": (imports("asyncrl"), LARGE),
    "public names": (PACKAGE, LARGE),
    "doctor --help": (command("doctor", "--help"), LARGE),
    "config check": (command("config", "check", "-c", "configs/quickstart.yaml"), LARGE),
    "config show": (command("config", "show", "run.seed=1"), LARGE),
    "config schema": (command("config", "schema"), LARGE),
    **{
        f"refused {name}": (command(name, "-c", "configs/quickstart.yaml", "run.dir=RUNS", mistake, code=2), LARGE)
        for name, mistake in REFUSED.items()
    },
    "views of records": (
        imports("asyncrl.cli.top", "asyncrl.deployment.known_runs", "asyncrl.views.watch", "asyncrl.views.status_text"),
        ("torch", "ray", "vllm", "transformers", "numpy"),
    ),
    "config": (imports(*modules_of(asyncrl.config)), HEAVY),
    "state machines": (
        imports(
            *modules_of(asyncrl.buffer),
            *modules_of(asyncrl.common),
            "asyncrl.coordinator.status",
            "asyncrl.weights.gate",
        ),
        HEAVY,
    ),
    "presets": (imports("asyncrl.algorithms.presets"), HEAVY),
    "baselines": (imports("asyncrl.algorithms.baselines"), HEAVY),
    "columns": (COLUMNS, HEAVY),
    "data plane": (imports("asyncrl.data_plane"), ("torch", "ray")),
    "report": (imports("asyncrl.views.report"), ("ray",)),
    "launch": (imports("asyncrl.deployment.launch"), ("ray",)),
    "status": (imports("asyncrl.cli.status"), ("ray",)),
    # It lists and clears rows, and reads none. torch would cost it 200 MB and seconds of its run.
    "client of the coordinator": (
        imports("sys", "asyncrl.coordinator.client", "asyncrl.data_plane.object_store") + "\nsys.modules['ray']",
        ("torch",),
    ),
}
"""Statements, and the modules that they must not import."""

RUN = """
import json, os, sys
cases = json.load(sys.stdin)
found = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # commands print to stdout
for name, (code, forbidden) in cases.items():
    exec(code, {"__name__": "case"})
    print(json.dumps([name, [each for each in forbidden if each in sys.modules]]), file=found, flush=True)
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Returns the modules that each case has imported and must not import. Cases after an error are missing."""
    folder = tmp_path_factory.mktemp("runs")
    cases = {name: (code.replace("RUNS", str(folder)), forbidden) for name, (code, forbidden) in CASES.items()}
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(cases), capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir()), "a refused run must make no file"
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("refused")])
def test_no_large_library_is_imported(case: str, imported: dict[str, list[str]]) -> None:
    assert imported[case] == []


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.fault("F28")
def test_a_run_that_cannot_be_is_refused_before_anything_heavy_is_imported(
    name: str, imported: dict[str, list[str]]
) -> None:
    assert imported[f"refused {name}"] == []
