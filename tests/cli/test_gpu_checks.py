"""`asyncrl doctor` on a machine with GPUs: each fact of `nvidia-smi` gets the right level, and a fix."""

from pathlib import Path

import pytest

from asyncrl.cli import gpu_checks
from asyncrl.cli.gpu_checks import Finding, Gpu, Gpus, Level, Probe, TorchBuild, parse, query_gpus

ANSWER = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <timestamp>Fri Nov 27 10:00:00 2026</timestamp>
  <driver_version>580.95.05</driver_version>
  <cuda_version>13.0</cuda_version>
  <attached_gpus>1</attached_gpus>
  <gpu id="00000000:04:00.0">
    <product_name>NVIDIA H200</product_name>
    <mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
    <fb_memory_usage><total>143771 MiB</total><reserved>611 MiB</reserved><used>0 MiB</used></fb_memory_usage>
    <compute_mode>Default</compute_mode>
  </gpu>
</nvidia_smi_log>
"""
H200 = Gpu(name="NVIDIA H200", memory_mib=143771, used_mib=0, compute_mode="Default")
GPUS = Gpus(driver="580.95.05", cuda="13.0", gpus=(H200,))
CUDA = TorchBuild(version="2.13.0", devices=1, cuda="13.0", peers=True)
PROBE = Probe(succeeded=True, last_line="2.13.0 1 13.0 True")


def gpu(**changes: object) -> Gpu:
    facts = {"name": "X", "memory_mib": 24576, "used_mib": 3, "compute_mode": "Default"}
    return Gpu(**{**facts, **changes})  # type: ignore[arg-type]


def test_the_answer_of_nvidia_smi_is_read() -> None:
    assert parse(ANSWER) == GPUS


@pytest.mark.parametrize(
    ("finding", "level", "says"),
    [
        (
            gpu_checks.check_driver(GPUS, CUDA),
            Level.OK,
            "1 GPUs: NVIDIA H200 (140 GiB); driver 580.95.05 for CUDA 13.0",
        ),
        (gpu_checks.check_driver(Gpus(driver="580", cuda="13.2", gpus=()), CUDA), Level.OK, "torch for CUDA 13.0"),
        (gpu_checks.check_driver(Gpus(driver="550", cuda="12.4", gpus=()), CUDA), Level.FAIL, "for CUDA 13 or newer"),
        (gpu_checks.check_driver(Gpus(driver="550", cuda="12.4", gpus=()), None), Level.OK, "driver 550"),
        (gpu_checks.check_driver("NVIDIA-SMI has failed\nmore", CUDA), Level.FAIL, "has failed"),
        (gpu_checks.check_nvml(True), Level.OK, "NVML"),
        (gpu_checks.check_nvml(False), Level.FAIL, "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
        (gpu_checks.check_compiler("/usr/bin/gcc", Path(__file__)), Level.OK, "/usr/bin/gcc"),
        (gpu_checks.check_compiler(None, Path(__file__)), Level.FAIL, "without a C compiler (gcc) →"),
        (gpu_checks.check_compiler("/usr/bin/gcc", Path("/no/Python.h")), Level.FAIL, "without /no/Python.h"),
        (gpu_checks.check_compiler(None, Path("/no/Python.h")), Level.FAIL, "python3-dev"),
        (gpu_checks.check_compute_mode([gpu()]), Level.OK, "Default"),
        (gpu_checks.check_compute_mode([gpu(), gpu(compute_mode="Exclusive_Process")]), Level.WARN, "-c DEFAULT"),
        (gpu_checks.check_free_memory([gpu()]), Level.OK, "free"),
        (gpu_checks.check_free_memory([gpu(), gpu(used_mib=20480)]), Level.WARN, "GPU 1 has 20.0 GiB in use"),
        (gpu_checks.check_peers(CUDA), Level.OK, "memory of the others"),
        (gpu_checks.check_peers(TorchBuild.of(Probe(succeeded=True, last_line="2 2 13.0 False"))), Level.WARN, "NCCL"),
    ],
)
def test_each_fact_gets_its_level_and_a_fix(finding: Finding, level: Level, says: str) -> None:
    assert finding.level is level
    assert says in f"{finding.what} → {finding.fix}"
    assert bool(finding.fix) is (level is not Level.OK)


@pytest.mark.parametrize("several", [False, True])
def test_peers_are_looked_at_only_with_several_gpus(several: bool) -> None:
    probe = Probe(succeeded=True, last_line="2.13.0 2 13.0 True") if several else PROBE
    whats = [finding.what for finding in gpu_checks.examine_gpus(GPUS, probe)]
    assert any("memory of the others" in what for what in whats) is several


def test_after_a_failure_of_nvidia_smi_nothing_else_is_looked_at() -> None:
    [finding] = gpu_checks.examine_gpus("no devices were found", PROBE)
    assert finding.level is Level.FAIL


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"cat <<'E'\n{ANSWER}E\n", GPUS),
        ("echo 'No devices were found'; exit 6", "No devices were found"),
        ("echo '<a/>'", "its answer cannot be read: it has no driver_version"),
        ("echo nonsense", "its answer cannot be read"),
        ("exit 9", "exit status 9"),
    ],
)
def test_the_program_is_asked(
    script: str, expected: Gpus | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = query_gpus()
    if isinstance(expected, Gpus):
        assert found == expected
    else:
        assert isinstance(found, str)
        assert found.startswith(expected)


def test_without_the_program_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert query_gpus() is None
