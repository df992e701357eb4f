"""Applies every deliberate break to a copy of the package and checks that its tests catch it: those of this folder, or
those of the witness, which compare a second path with the first one.

    python tests/algorithms/run_mutations.py [part of a name …]          # for example: witness

Prints one line for each break. The exit code is 1 if the tests pass despite a break, or if a break does not apply.
Modules that are slow to import are imported once, and each break is then tested in a forked process of its own. All
breaks together take some minutes on one core.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import msgspec  # noqa: F401
import pydantic  # noqa: F401
import pytest
import torch
from mutations import MUTATIONS, Mutation

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parent.parent
LEFT_OUT = {
    # importing their libraries takes longer than running all other tests
    "test_liger_oracle.py", "test_torchrl_oracle.py", "test_plain_pass.py",
    "test_losses_page.py",  # the copy has no page
}  # fmt: skip
FIRST = ["test_preset_oracles.py", "test_off_policy_oracles.py", "test_axes_by_hand.py"]
DEADLINE_S = 300
NO_VERDICT = 70


def files(tests: str) -> list[str]:
    """Returns the test files of a folder, starting with those that catch most breaks, because a run stops at its first
    failure."""
    found = sorted(path for path in (TESTS.parent / tests).glob("test_*.py") if path.name not in LEFT_OUT)
    return [str(path) for path in sorted(found, key=lambda path: path.name not in FIRST)]


def run_tests(package_root: Path, log: Path, tests: str) -> int:
    """Returns pytest's exit code from a forked process that imports the package from `package_root`, and runs the tests
    of a folder."""
    child = os.fork()
    if child == 0:
        code = NO_VERDICT
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.path = [str(package_root), *(entry for entry in sys.path if Path(entry).resolve() != REPOSITORY)]
            os.environ["PYTHONPATH"] = str(package_root)
            import asyncrl

            if asyncrl.__file__ is not None and Path(asyncrl.__file__).is_relative_to(package_root):
                code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *files(tests)]))
            sys.stdout.flush()
        finally:
            os._exit(code)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return NO_VERDICT


def caught_by(log: Path) -> str:
    """Returns the first failed test, or the last line of the log if no test failed."""
    lines = log.read_text().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0].rsplit("/", 1)[-1] if failed else (lines or ["no output"])[-1]


def main(wanted: list[str]) -> int:
    # a .pyc file may be stale if its source changes twice within a second; the tests would then run the unbroken code
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    chosen = [mutation for mutation in MUTATIONS if not wanted or any(part in mutation.name for part in wanted)]
    wrong: list[Mutation] = []
    with tempfile.TemporaryDirectory() as folder:
        root, log = Path(folder).resolve(), Path(folder).resolve() / "log"
        shutil.copytree(REPOSITORY / "asyncrl", root / "asyncrl", ignore=shutil.ignore_patterns("__pycache__"))
        for tests in sorted({mutation.tests for mutation in chosen}):
            if run_tests(root, log, tests) != 0:
                print(log.read_text())
                print(f"the tests in tests/{tests} fail without a break")
                return 1
        for mutation in chosen:
            path = root / "asyncrl" / mutation.file
            text = path.read_text()
            if text.count(mutation.old) != 1:
                verdict, detail = "DOES NOT APPLY", f"{text.count(mutation.old)} occurrences in {mutation.file}"
            else:
                path.write_text(text.replace(mutation.old, mutation.new))
                code = run_tests(root, log, mutation.tests)
                path.write_text(text)
                # exit code 1 means that tests failed; any other code says nothing about the break
                verdict, detail = ("caught", caught_by(log)) if code == 1 else ("SURVIVED", f"exit code {code}")
            if verdict != "caught":
                wrong.append(mutation)
            print(f"{verdict:14} | {mutation.name:45} | {detail}", flush=True)
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} caught")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
