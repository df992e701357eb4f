"""The installer refuses machines on which asyncrl cannot run, before it downloads anything, and finds torch's build."""

import ast
import doctest
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "deploy"))
import install

SCRIPT = Path(install.__file__)
HERE = sys.version_info[:2]


def machine(**changed: Any) -> install.Machine:
    """Returns a machine on which asyncrl can be installed, with some changes."""
    good = {
        "system": "Linux",
        "processor": "x86_64",
        "libc": "glibc",
        "free_gib": 50.0,
        "pythons": {(3, 12): "python3.12"},
        "can_make_venv": True,
        "can_compile": True,
    }
    return install.Machine(**{**good, **changed})


GOOD = machine()


def test_the_installer_runs_on_old_pythons_which_it_refuses() -> None:
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 6))
    passed = {keyword.arg for call in ast.walk(tree) if isinstance(call, ast.Call) for keyword in call.keywords}
    assert not passed & {"capture_output", "text", "missing_ok", "dirs_exist_ok"}, "later Pythons have these"


def test_its_examples_hold() -> None:
    assert doctest.testmod(install).failed == 0


@pytest.mark.parametrize("python", install.PYTHONS)
@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
def test_linux_on_either_processor_is_accepted_with_each_python(python: tuple[int, int], processor: str) -> None:
    found = machine(processor=processor, pythons={python: "python"})
    assert install.refusal(found, "cpu") is None
    assert install.refusal(found, "gpu") is None


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
    why = install.refusal(machine(**changed), "cpu")
    assert why is not None
    assert said in why
    assert re.search(r"Use |Install |install |Free ", why), "it says what to do"


def test_an_installation_that_is_there_needs_little_space() -> None:
    assert install.refusal(machine(free_gib=2.0, has_packages=True), "gpu") is None
    assert install.refusal(machine(free_gib=0.5, has_packages=True), "cpu") is not None


def test_a_folder_that_is_not_an_environment_is_refused_and_an_environment_keeps_its_python(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(tmp_path / "gone")
    with pytest.raises(install.Refused, match="Remove this folder"):
        install.this_machine(tmp_path, False)
    (tmp_path / "bin" / "python").unlink()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert install.this_machine(tmp_path, False).pythons == {HERE: str(tmp_path / "bin" / "python")}


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
def test_a_proxy_that_refuses_is_named(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    refusing = {
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        "PIP_CONFIG_FILE": "/dev/null",
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--extra", "cpu", "--venv", str(tmp_path / "venv")],
        env=kept | refusing, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "pip got no package from its registry" in done.stderr
    assert "HTTPS_PROXY" in done.stderr


class Sources:
    """An environment whose sources of packages have certain builds of torch and torchvision."""

    python = "python"

    def __init__(self, *, pip: Sequence[str] = (), pytorch: bool = False) -> None:
        self._pip, self._pytorch = pip, pytorch
        self.made: list[str] = []

    def uv_can(self, *arguments: str) -> str:
        assert arguments[0] == "--no-config", "the overrides of pyproject.toml allow any build"
        if "--torch-backend" in arguments:
            return "" if self._pytorch else "dns error"
        name, version = arguments[-1].split("==")
        return "" if name in self._pip and version.endswith("+cpu") else "no version"

    def uv(self, *arguments: str) -> None:
        self.made.append(" ".join(arguments))


VERSIONS = install.pinned("cpu")
TORCH = f"torch=={VERSIONS['torch']}"
TORCHVISION = f"torchvision=={VERSIONS['torchvision']}"


def test_torch_comes_from_pip_s_sources_if_they_have_its_build_for_cpus() -> None:
    sources = Sources(pip=["torch", "torchvision"])
    assert install.torch_for_cpus(sources, GOOD) == []
    assert sources.made == [
        f"install --no-config --python python --compile-bytecode --no-deps {TORCH}+cpu {TORCHVISION}+cpu"
    ]


def test_torchvision_of_another_build_is_left_out() -> None:
    sources = Sources(pip=["torch"])
    assert install.torch_for_cpus(sources, GOOD) == ["torchvision ; python_version < '3'"]
    assert sources.made == [f"install --no-config --python python --compile-bytecode --no-deps {TORCH}+cpu"]


def test_torch_comes_from_pytorch_s_index_if_pip_s_sources_have_only_the_build_for_cuda() -> None:
    sources = Sources(pytorch=True)
    assert install.torch_for_cpus(sources, GOOD) == []
    assert sources.made == [
        f"install --no-config --python python --compile-bytecode --torch-backend cpu {TORCH} {TORCHVISION}"
    ]


def test_without_any_build_for_cpus_the_one_for_cuda_is_taken_if_there_is_room(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sources = Sources()
    assert install.torch_for_cpus(sources, GOOD) == []
    assert sources.made == []
    assert "(dns error). So this takes the build for CUDA" in capsys.readouterr().out
    with pytest.raises(install.Refused, match=r"only 6\.0 GiB are free"):
        install.torch_for_cpus(Sources(), machine(free_gib=6.0))


def test_builds_for_cpus_are_excluded_for_gpus() -> None:
    versions = install.pinned("gpu")
    assert install.for_gpus() == [
        f"torch != {versions['torch']}+cpu",
        f"torchvision != {versions['torchvision']}+cpu",
    ]


@pytest.mark.slow
def test_an_environment_without_pip_gets_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], timeout=60, check=True)
    python = tmp_path / "bin" / "python"
    environment = install.Environment(python)
    environment.pip = lambda *_: ""  # type: ignore[method-assign] # without the registry
    environment.get_uv()
    assert subprocess.run([python, "-m", "pip", "--version"], timeout=60, check=False).returncode == 0


def test_this_machine_can_be_installed_on() -> None:
    found = install.this_machine(Path(sys.prefix), True)
    assert install.refusal(install.Machine(*found[:3], 50.0, *found[4:]), "cpu") is None


def test_settings_of_pip_reach_uv() -> None:
    listed = (
        ":env:.index-url='https://mine.example/simple'\n"
        "global.extra-index-url='https://a.example/simple\\nhttps://b.example/simple'\n"
        "global.index-url='https://all.example/simple'\n"
        "global.no-index='true'\nglobal.timeout='60'\n:env:.cert='/etc/ca.pem'\n"
        "global.trusted-host='a.example b.example'\n"
        "install.find-links='/wheels /more'\nwheel.find-links='/others'\n"
    )
    assert install.uv_settings(listed) == {
        "UV_DEFAULT_INDEX": "https://mine.example/simple",
        "UV_INDEX": "https://a.example/simple https://b.example/simple",
        "UV_NO_INDEX": "true",
        "SSL_CERT_FILE": "/etc/ca.pem",
        "UV_INSECURE_HOST": "a.example b.example",
        "UV_FIND_LINKS": "/wheels,/more",
    }


def test_a_failure_is_told_by_its_last_error() -> None:
    said = "Using Python 3.12\nerror: Request failed\n  cause: dns error\nhint: look at the docs\n"
    last_error = install._last_error
    assert last_error(said, begins=("cause:", "error:")) == "dns error"
    assert last_error("", begins=("ERROR",)) == "no message"


class Recorded(Sources):
    """An environment that has the other build of vLLM."""

    def get_uv(self) -> None:
        pass

    def remove_vllm_unless(self, extra: str) -> None:
        self.made.append(f"remove all but {extra}")


@pytest.mark.parametrize(
    ("extra", "extras", "pinned"), [("light", "test", "cpu"), ("cpu", "test,cpu", "cpu"), ("gpu", "test,gpu", "gpu")]
)
def test_light_leaves_vllm_out_and_keeps_the_versions_for_cpus(extra: str, extras: str, pinned: str) -> None:
    environment = Recorded(pip=["torch", "torchvision"])
    install.install(environment, GOOD, extra, ["test"], editable=True)
    *_, last = environment.made
    assert f"--constraint constraints-{pinned}.txt" in last
    assert last.endswith(f"--editable {install.ROOT}[{extras}]")
    assert "hashes" not in last
    assert [each for each in environment.made if each.startswith("remove")] == (
        [] if extra == "light" else [f"remove all but {extra}"]
    )


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_the_installation_of_an_image_compares_checksums(extra: str) -> None:
    environment = Recorded(pip=["torch", "torchvision"])
    install.install(environment, GOOD, extra, [], editable=False, hashes=True)
    *_, last = environment.made
    assert f"--constraint constraints-{extra}.txt --constraint deploy/docker/hashes-{extra}.txt" in last
    assert (install.ROOT / "deploy" / "docker" / f"hashes-{extra}.txt").exists()
