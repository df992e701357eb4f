"""The example of docs/library.md runs unchanged, and imports neither Ray nor vLLM."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "library.md"


@pytest.mark.slow
def test_the_example_differentiates_a_loss_without_ray_or_vllm() -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    check = "import sys\nassert not {'ray', 'vllm'} & set(sys.modules)\n"
    done = subprocess.run(
        [sys.executable, "-c", code + check], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    # The advantages are ±0.707. There are four rows of five tokens each, that is twenty tokens.
    assert done.stdout.startswith("loss 0.000, gradient 0.707, ")


def test_every_module_that_the_page_names_is_there() -> None:
    modules = set(re.findall(r"`asyncrl\.([\w.]+)`", PAGE.read_text()))
    package = PAGE.parent.parent / "asyncrl"
    assert modules
    assert [name for name in modules if not list(package.glob(f"{name.replace('.', '/')}*"))] == []
