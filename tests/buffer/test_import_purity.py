"""The state machines, the config and `import asyncrl` itself import neither torch nor ray nor vllm."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import asyncrl.buffer
import asyncrl.config


def modules_of(package: ModuleType) -> list[str]:
    """Returns the modules of a package. The buffer's actor.py is left out, because it is the shell for Ray."""
    assert package.__file__
    stems = sorted(path.stem for path in Path(package.__file__).parent.glob("*.py"))
    return [package.__name__] + [f"{package.__name__}.{stem}" for stem in stems if stem not in ("__init__", "actor")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "modules",
    [["asyncrl"], modules_of(asyncrl.config), [*modules_of(asyncrl.buffer), "asyncrl.weights.gate"]],
    ids=["asyncrl", "config", "state machines"],
)
def test_importing_pulls_in_no_heavy_package(modules: list[str]) -> None:
    script = f"import sys, {', '.join(modules)}; print([m for m in ('torch', 'ray', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
