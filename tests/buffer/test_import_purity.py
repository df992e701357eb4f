"""The state machines, the config and `import asyncrl` itself import neither torch nor ray nor vllm."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import asyncrl.buffer
import asyncrl.common
import asyncrl.config


def modules_of(package: ModuleType) -> list[str]:
    """Returns the modules of a package."""
    assert package.__file__
    stems = sorted(path.stem for path in Path(package.__file__).parent.glob("*.py"))
    return [package.__name__] + [f"{package.__name__}.{stem}" for stem in stems if stem != "__init__"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "modules",
    [
        ["asyncrl"],
        modules_of(asyncrl.config),
        [
            *modules_of(asyncrl.buffer),
            *modules_of(asyncrl.common),
            "asyncrl.coordinator.status",
            "asyncrl.weights.gate",
        ],
    ],
    ids=["asyncrl", "config", "state machines"],
)
def test_importing_pulls_in_no_heavy_package(modules: list[str]) -> None:
    script = f"import sys, {', '.join(modules)}; print([m for m in ('torch', 'ray', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
