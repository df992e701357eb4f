"""Writes how many seconds each test file takes, from the results of a whole run of the suite.

    make durations

`durations.csv` has a line for each file that takes at least a second, the longest first: its seconds, the number of its
tests, and its slowest test. Seconds are those of the tests with their fixtures; a fixture that several tests share
counts for the first one. They depend on the machine and its other work: compare the lines of one run with each other.
"""

import argparse
import csv
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

RESULTS = Path(__file__).parent / "durations.csv"
LEAST_S = 1.0


def durations(results: Path) -> list[tuple[float, int, str, str]]:
    """Returns seconds, number of tests, file, and slowest test with its seconds, the longest file first."""
    tests: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for case in ElementTree.parse(results).iter("testcase"):
        tests[case.attrib["classname"]].append((float(case.attrib["time"]), case.attrib["name"]))
    found = []
    for name, cases in tests.items():
        slowest_s, slowest = max(cases)
        file = f"{name.replace('.', '/')}.py"
        found.append((round(sum(s for s, _ in cases), 1), len(cases), file, f"{slowest} ({slowest_s:.1f} s)"))
    return sorted(found, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a file of pytest's --junitxml")
    found = durations(parser.parse_args().results)
    with RESULTS.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["seconds", "tests", "file", "slowest test"])
        lines.writerows(each for each in found if each[0] >= LEAST_S)
    print(f"{sum(each[0] for each in found):.0f} s in {len(found)} files: {RESULTS}")


if __name__ == "__main__":
    main()
