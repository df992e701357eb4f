"""The files for the repository's host and for pre-commit: they are valid, and call targets and programs that exist."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
FORGE = REPOSITORY / ".github"
SCHEMAS = {
    ".github/workflows/ci.yml": "github-workflows",
    ".github/workflows/release.yml": "github-workflows",
    ".github/workflows/weekly.yml": "github-workflows",
    ".github/ISSUE_TEMPLATE/bug.yml": "github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "github-issue-config",
    "CITATION.cff": "citation-file-format",
}


def read(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((REPOSITORY / name).read_text())
    return loaded


def commands(name: str) -> list[str]:
    """Returns the commands of a workflow."""
    return [step["run"] for job in read(name)["jobs"].values() for step in job["steps"] if "run" in step]


def test_every_file_has_a_schema() -> None:
    files = {str(file.relative_to(REPOSITORY)) for file in FORGE.rglob("*.yml")}
    assert files == {name for name in SCHEMAS if name.startswith(".github")}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_it_is_what_its_schema_allows(name: str) -> None:
    schema = f"vendor.{SCHEMAS[name]}"
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(REPOSITORY / name)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (".github/workflows/ci.yml", {"check", "unit", "test"}),
        (".github/workflows/release.yml", {"check", "test", "wheel", "images", "version"}),
        (".github/workflows/weekly.yml", {"campaign"}),
    ],
)
def test_workflows_call_targets_that_exist(name: str, wanted: set[str]) -> None:
    called = set(re.findall(r"\bmake (?:--\S+ )*([a-z]+)", " ; ".join(commands(name))))
    targets = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert called == wanted
    assert called <= targets


def test_only_the_upload_to_pypi_may_get_a_token_and_no_workflow_may_write_to_the_repository() -> None:
    for name in (name for name in SCHEMAS if "workflows" in name):
        workflow = read(name)
        assert workflow["permissions"] == {"contents": "read"}
        granted = {job: rights["permissions"] for job, rights in workflow["jobs"].items() if "permissions" in rights}
        assert granted == ({"pypi": {"id-token": "write"}} if "release" in name else {})


def test_a_release_keeps_the_licences_and_the_parts_of_each_image_before_it_is_published() -> None:
    jobs = read(".github/workflows/release.yml")["jobs"]
    assert ".venv/bin/python deploy/licences.py --output licences.md" in [
        step.get("run") for step in jobs["wheel"]["steps"]
    ]
    steps = jobs["images"]["steps"]
    listed = [step["with"] for step in steps if step.get("uses", "").startswith("anchore/sbom-action@")]
    targets = re.findall(r"--target (\w+)", (REPOSITORY / "Makefile").read_text())
    assert [each["image"].rpartition("-")[2] for each in listed] == targets
    assert {each["format"] for each in listed} == {"cyclonedx-json"}
    [push] = [number for number, step in enumerate(steps) if "docker push" in step.get("run", "")]
    [kept] = [number for number, step in enumerate(steps) if step.get("with", {}).get("name") == "sbom"]
    assert push < kept, "a list that cannot be made does not hold the images back"
    artifacts = [
        step["with"] for job in jobs.values() for step in job["steps"] if "upload-artifact@" in step.get("uses", "")
    ]
    assert {each["name"]: each["path"] for each in artifacts} == {
        "wheel": "dist/", "licences": "licences.md", "sbom": "sbom/"
    }  # fmt: skip


def test_the_form_for_bugs_asks_for_doctor_and_run_json() -> None:
    fields = {field["id"]: field for field in read(".github/ISSUE_TEMPLATE/bug.yml")["body"] if "id" in field}
    assert "`asyncrl doctor`" in fields["doctor"]["attributes"]["label"]
    assert fields["doctor"]["validations"] == {"required": True}
    assert "`run.json`" in fields["run"]["attributes"]["label"]


@pytest.mark.slow
def test_the_hooks_are_programs_of_the_environment_and_need_no_network() -> None:
    [local] = read(".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    for hook in local["hooks"]:
        program, *arguments = hook["entry"].split()
        assert program.startswith(".venv/bin/")
        assert hook["language"] == "system"
        command = [Path(sys.executable).parent / Path(program).name, *arguments, "--help"]
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, hook["entry"]
