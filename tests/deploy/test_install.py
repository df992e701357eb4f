"""The installer refuses machines on which asyncrl cannot run, before it downloads anything, and finds torch's build."""

import ast
import doctest
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "deploy"))
import install

SCRIPT = Path(install.__file__)
HERE = sys.version_info[:2]
GOOD = install.Machine(
    system="Linux",
    processor="x86_64",
    libc="glibc",
    free_gib=50.0,
    pythons={(3, 12): "python3.12"},
    can_make_venv=True,
    can_compile=True,
)


def test_the_installer_can_be_read_by_old_pythons_which_it_refuses() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))


def test_its_examples_hold() -> None:
    assert doctest.testmod(install).failed == 0


@pytest.mark.parametrize("python", install.PYTHONS)
@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
def test_linux_on_either_processor_is_accepted_with_each_python(python: tuple[int, int], processor: str) -> None:
    machine = GOOD._replace(processor=processor, pythons={python: "python"})
    assert install.refusal(machine, "cpu") is None
    assert install.refusal(machine, "gpu") is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"system": "Windows"}, "WSL 2"),
        ({"system": "Darwin"}, "macOS"),
        ({"processor": "riscv64"}, "this processor is riscv64"),
        ({"libc": "musl"}, "glibc"),
        ({"pythons": {(3, 10): "python3"}}, "needs Python 3.11, 3.12 or 3.13, but this machine has Python 3.10"),
        ({"can_make_venv": False}, "sudo apt install python3.12-venv"),
        ({"can_compile": False}, "sudo apt install build-essential python3.12-dev"),
        ({"free_gib": 2.0}, "only 2.0 GiB are free"),
    ],
)
def test_another_machine_is_refused_with_what_to_do(changed: dict[str, Any], said: str) -> None:
    why = install.refusal(GOOD._replace(**changed), "cpu")
    assert why is not None
    assert said in why
    assert re.search(r"Use |Install |install |Free ", why), "it says what to do"


def test_a_newer_or_older_python_takes_another_one_that_fits() -> None:
    assert install.chosen({(3, 14): "a", (3, 13): "b", (3, 11): "c"}) == (HERE if HERE == (3, 11) else (3, 13))
    assert install.chosen({(3, 10): "a"}) is None


FAKED = """
import platform, runpy, sys
platform.{function} = lambda: {value!r}
sys.argv = ["install.py", "--venv", {venv!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "value", "said"), [("system", "Darwin", "macOS"), ("machine", "ppc64le", "processor is ppc64le")]
)
def test_the_command_ends_before_it_makes_an_environment(function: str, value: str, said: str, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    code = FAKED.format(function=function, value=value, venv=str(venv), script=str(SCRIPT))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert not venv.exists()


@pytest.mark.slow
def test_a_proxy_that_refuses_is_named_within_seconds(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    refusing = {
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        "PIP_CONFIG_FILE": "/dev/null",
    }
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--extra", "cpu", "--venv", str(tmp_path / "venv")],
        env=kept | refusing, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "pip got no package from its registry" in done.stderr
    assert "HTTPS_PROXY" in done.stderr
    assert time.monotonic() - began_s < 150  # making the environment takes most of it; a hang would take longer


class Sources:
    """An environment whose sources of packages have certain builds of torch and torchvision."""

    def __init__(self, *, pip: Sequence[str] = (), pytorch: bool = False) -> None:
        self._pip, self._pytorch = pip, pytorch
        self.made: list[str] = []

    def offered(self, package: str) -> str:
        name, version = package.split("==")
        return f"{version}+cpu" if name in self._pip else version

    def pip(self, *arguments: str) -> str:
        self.made.append(" ".join(["pip", *arguments]))
        return ""

    def uv_can(self, *arguments: str) -> str:
        return "" if self._pytorch else "dns error"

    def uv(self, *arguments: str) -> None:
        self.made.append(" ".join(["uv", *arguments]))


VERSIONS = install.pinned("cpu")
TORCH = f"torch=={VERSIONS['torch']}"
BOTH = f"{TORCH} torchvision=={VERSIONS['torchvision']}"


def test_torch_comes_from_pip_s_sources_if_they_have_its_build_for_cpus() -> None:
    sources = Sources(pip=["torch", "torchvision"])
    assert install.torch_for_cpus(sources, GOOD) == []
    assert sources.made == [f"pip install --quiet --no-deps {BOTH}"]


def test_torchvision_of_another_build_is_left_out() -> None:
    sources = Sources(pip=["torch"])
    assert install.torch_for_cpus(sources, GOOD) == ["torchvision ; python_version < '3'"]
    assert sources.made == [f"pip install --quiet --no-deps {TORCH}"]


def test_torch_comes_from_pytorch_s_index_if_pip_s_sources_have_only_the_build_for_cuda() -> None:
    sources = Sources(pytorch=True)
    assert install.torch_for_cpus(sources, GOOD) == []
    assert sources.made == [f"uv --torch-backend cpu {BOTH}"]


def test_without_any_build_for_cpus_the_one_for_cuda_is_taken_if_there_is_room(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sources = Sources()
    assert install.torch_for_cpus(sources, GOOD) == []
    assert sources.made == []
    assert "cannot be used (dns error). So this takes the build for CUDA" in capsys.readouterr().out
    with pytest.raises(install.Refused, match=r"only 6\.0 GiB are free"):
        install.torch_for_cpus(Sources(), GOOD._replace(free_gib=6.0))


def test_this_machine_can_be_installed_on() -> None:
    found = install.this_machine(Path(sys.prefix), True)
    assert install.refusal(found._replace(free_gib=50.0), "cpu") is None


def test_settings_of_pip_reach_uv() -> None:
    listed = (
        "global.extra-index-url='https://a.example/simple\\nhttps://b.example/simple'\n"
        "global.timeout='60'\n:env:.cert='/etc/ca.pem'\nglobal.trusted-host='a.example'\n"
    )
    assert install.uv_settings(listed) == {
        "UV_INDEX": "https://a.example/simple https://b.example/simple",
        "SSL_CERT_FILE": "/etc/ca.pem",
        "UV_INSECURE_HOST": "a.example",
    }
