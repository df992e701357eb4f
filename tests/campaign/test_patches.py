"""The patches of the fault campaign (run_faults.py) fit to the code of today, and plant faults only
where the witness does not lie."""

import re
import subprocess
from pathlib import Path

import pytest
from run_faults import FAULTS, FINDERS, REPOSITORY, faults

PATCHES = sorted(FAULTS.glob("*.patch"))
WITNESS = re.compile(r"asyncrl/(witness/|ranks/witnessed|learner/witnessed_step)")


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_a_patch_applies(patch: Path) -> None:
    checked = subprocess.run(["git", "apply", "--check", str(patch)], cwd=REPOSITORY, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_a_patch_is_small_and_leaves_the_witness_alone(patch: Path) -> None:
    diff = patch.read_text().partition("\n--- ")[2].splitlines()
    added = [line for line in diff if re.match(r"\+(?!\+\+ )", line)]
    removed = [line for line in diff if re.match(r"-(?!-- )", line)]
    assert 1 <= max(len(added), len(removed)) <= 6
    assert not any(WITNESS.search(line) for line in diff if line.startswith("+++ "))


def test_the_first_lines_of_all_patches_can_be_read() -> None:
    known = faults()
    assert len(known) == len(PATCHES) + 1
    for fault in known.values():
        assert fault.what
        assert set(fault.found_by["float32"]) <= {*FINDERS}
        assert (REPOSITORY / "configs" / f"{fault.config}.yaml").is_file()
        assert all(re.fullmatch(r"[\w.]+=\S+", setting) for setting in fault.settings), fault.name
