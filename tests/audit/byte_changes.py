"""Changes single bytes of a run directory, and asks the audit.

`python tests/audit/byte_changes.py RUN` changes 1,000 bytes of a copy, and prints for each file how many were found.
"""

import argparse
import random
import shutil
import tempfile
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

from asyncrl.audit.audit import audit
from asyncrl.audit.history import Verdict
from asyncrl.errors import AsyncRLError

COVERED = ("audit/*", "steps.jsonl", "checkpoints/step-*")
"""Files of a run directory that the audit covers, except for `NOT_COVERED`: docs/guarantees.md names both."""
NOT_COVERED = ("checkpoints/step-*/manifest.json", "checkpoints/step-*/COMPLETE", "audit/weights/*/COMPLETE")


def is_covered(path: Path, directory: Path) -> bool:
    name = path.relative_to(directory).as_posix()
    return any(fnmatch(name, each) for each in COVERED) and not any(
        fnmatch(name, each) and name.count("/") == each.count("/") for each in NOT_COVERED
    )


def is_found(directory: Path, path: Path, *, place: int, flip: int) -> bool:
    """Changes a byte of a file, asks the audit, and changes the byte back. Returns whether a check failed."""
    write(path, place, flip)
    try:
        return any(outcome.verdict is Verdict.FAILED for outcome in audit(directory))
    except AsyncRLError:
        return True
    finally:
        write(path, place, flip)


def write(path: Path, place: int, flip: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ flip]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="directory of a run; a copy is changed")
    parser.add_argument("--changes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        directory = shutil.copytree(options.run, Path(folder) / options.run.name)
        for outcome in audit(directory):
            print(outcome, flush=True)
        files = sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)
        counts: Counter[tuple[str, bool]] = Counter()
        for _ in range(options.changes):
            path = chance.choice(files)
            place, flip = chance.randrange(path.stat().st_size), chance.randrange(1, 256)
            found = is_found(directory, path, place=place, flip=flip)
            counts[path.relative_to(directory).as_posix(), found] += 1
            if not found and is_covered(path, directory):
                print(f"NOT FOUND: {path.relative_to(directory)} byte {place} xor {flip}", flush=True)
        print("| file | covered | changes | found |\n| --- | --- | --- | --- |")
        for name in sorted({name for name, _ in counts}):
            covered = "yes" if is_covered(directory / name, directory) else "no"
            print(f"| {name} | {covered} | {counts[name, True] + counts[name, False]} | {counts[name, True]} |")


if __name__ == "__main__":
    main()
