"""Makes run directories that another person could send: each input is a run of this project with one thing changed.

`INPUTS` has a name and a function for each. The function gets the run's directory, which is `<place>/runs/evil`. Beside
it are a good run, `<place>/runs/good`, and `<place>/outside` with files that no command may read, write or remove.
"""

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from audited_run import AuditedRun, changed
from made_up_run import make_step

from asyncrl.buffer.records import FilteredGroup
from asyncrl.checkpoints.directory import FileEntry, RunManifest
from asyncrl.learner.audit_records import TrainedStep
from asyncrl.learner.records import EvalRecord, RunInfo, SampleRecord

SECRET = b"a line of a file that is not in the run directory\n"
GONE = 2**31 - 5
"""A number that no process has."""
Change = Callable[[Path], None]


async def write_run(runs: Path, name: str) -> Path:
    """Writes a run of two steps with samples, an evaluation and checkpoints. Its process is gone."""
    run = AuditedRun(runs, name=name, total_steps=2)
    await run.start()
    with run.run_dir:
        await run.run()
    run.folder.cleanup()
    directory = run.run_dir.path
    record = SampleRecord(
        step=1, group=0, prompt="a", rendered_prompt="a", completion="bc", tokens=("b", "c"), answer="b", reward=1.0,
        advantage=0.5, version_spans=((0, 2),), turns=((0, 2),), trained_spans=((True, 2),), staleness_versions=1,
        truncated=False, generation_logprobs=(-0.5, -0.25), prev_logprobs=(-0.5, -0.25),
    )  # fmt: skip
    (directory / "samples" / "step-1.jsonl").write_bytes(msgspec.json.encode(record) + b"\n")
    evaluation = EvalRecord(version=2, wall_s=1.0, prompts=1, reward_mean=0.5)
    (directory / "evals.jsonl").write_bytes(msgspec.json.encode(evaluation) + b"\n")
    (directory / "logs" / "up-0.log").write_text("started\n")
    edit_info(directory, state="running", pid=GONE, host=socket.gethostname(), finished=None, exit_reason=None)
    return directory


def outside(directory: Path) -> Path:
    """Returns the folder whose files no command may touch."""
    return directory.parent.parent / "outside"


def edit_info(directory: Path, **fields: Any) -> None:
    info = msgspec.to_builtins(msgspec.json.decode((directory / "run.json").read_bytes(), type=RunInfo))
    (directory / "run.json").write_bytes(msgspec.json.encode(info | fields))


def linked(name: str, target: str = "secret.txt") -> Change:
    """Returns a change: the entry is a symbolic link to a file or a folder outside, or to an absolute path."""

    def change(directory: Path) -> None:
        path = removed(directory, name)
        path.symlink_to(outside(directory).absolute() / target)

    return change


def piped(name: str) -> Change:
    return lambda directory: os.mkfifo(removed(directory, name))


def bound(name: str) -> Change:
    """Returns a change: the entry is a socket."""

    def change(directory: Path) -> None:
        here = os.open(removed(directory, name).parent, os.O_RDONLY)
        try:
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(f"/proc/self/fd/{here}/{Path(name).name}")
        finally:
            os.close(here)

    return change


def removed(directory: Path, name: str) -> Path:
    """Returns the path of an entry, which is moved aside if there is one."""
    path = directory / name
    if os.path.lexists(path):
        path.rename(directory.parent.parent / "moved-aside")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def written(name: str, data: bytes) -> Change:
    def change(directory: Path) -> None:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)

    return change


def appended(name: str, data: bytes) -> Change:
    def change(directory: Path) -> None:
        with (directory / name).open("ab") as file:
            file.write(data)

    return change


def sparse(name: str) -> Change:
    """Returns a change: the file has a length of 1 TB, and takes no place on the disk."""
    return lambda directory: os.truncate(directory / name, 10**12)


def stepped(**fields: Any) -> Change:
    """Returns a change: one more line in steps.jsonl with these fields."""
    return appended("steps.jsonl", msgspec.json.encode(msgspec.to_builtins(make_step(2)) | fields) + b"\n")


def sampled(**fields: Any) -> Change:
    """Returns a change: the sample has these fields."""

    def change(directory: Path) -> None:
        path = directory / "samples" / "step-1.jsonl"
        path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | fields) + b"\n")

    return change


def listed(name: str) -> Change:
    """Returns a change: the manifest of the checkpoint lists this file, with the checksum of its content."""

    def change(directory: Path) -> None:
        path = directory / "checkpoints" / "step-2" / "manifest.json"
        manifest = msgspec.json.decode(path.read_bytes(), type=RunManifest)
        entry = FileEntry(nbytes=len(SECRET), xxh3=xxhash.xxh3_128_hexdigest(SECRET))
        files = manifest.files | {name.format(outside=outside(directory).absolute()): entry}
        data = msgspec.json.encode(msgspec.structs.replace(manifest, files=files))
        path.write_bytes(data)
        marker = path.with_name("COMPLETE")
        sizes = msgspec.json.decode(marker.read_bytes())
        sizes["files"]["manifest.json"] = len(data)
        marker.write_bytes(msgspec.json.encode(sizes))

    return change


def framed(payload: bytes) -> Change:
    """Returns a change: one more frame in the audit's records, with the right checksum."""
    head = struct.pack("<IQ", len(payload), xxhash.xxh3_64_intdigest(payload))
    return appended("audit/steps-1.msgpack", head + payload)


def filtered(directory: Path) -> None:
    def edit(records: list[Any]) -> None:
        place = next(place for place, each in enumerate(records) if isinstance(each, TrainedStep))
        group = FilteredGroup(reward=1.0, samples=HUGE)
        records[place] = msgspec.structs.replace(records[place], filtered=(group,))

    changed(directory, 1, edit)


def moved(name: str, to: str) -> Change:
    def change(directory: Path) -> None:
        (directory / name).rename(directory / to)

    return change


def deep(name: str) -> Change:
    return appended(name, b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n")


def nested_folders(directory: Path) -> None:
    here = os.getcwd()
    os.chdir(directory / "checkpoints" / "step-2")
    try:
        for _ in range(200):
            os.mkdir("a")
            os.chdir("a")
    finally:
        os.chdir(here)


def configured(text: str) -> Change:
    return appended("config.yaml", text.encode())


def bomb(*, merged: bool) -> str:
    """Returns YAML whose aliases stand for 9^12 values."""
    item, last = ("{{<<: [{}]}}", "{k: 1}") if merged else ("[{}]", "[1, 1]")
    lines = [f"  a0: &a0 {last}"]
    lines += [f"  a{n}: &a{n} " + item.format(", ".join([f"*a{n - 1}"] * 9)) for n in range(1, 13)]
    return "\nbomb:\n" + "\n".join(lines) + "\n"


HUGE = 10**12
INPUTS: list[tuple[str, Change]] = [
    # Links to files and folders outside.
    ("run.json is a link", linked("run.json")),
    ("run.json is a link to a device", linked("run.json", "/dev/zero")),
    ("config.yaml is a link", linked("config.yaml")),
    ("config.yaml is a link to a device", linked("config.yaml", "/dev/zero")),
    ("steps.jsonl is a link", linked("steps.jsonl")),
    ("evals.jsonl is a link to a device", linked("evals.jsonl", "/dev/zero")),
    ("summary.json is a link", linked("summary.json")),
    ("failures.json is a link to a device", linked("failures.json", "/dev/zero")),
    ("lineage.json is a link", linked("lineage.json")),
    ("report.html is a link", linked("report.html")),
    ("the lock is a link", linked("lock")),
    ("the lock is a link to nothing", linked("lock", "not-there")),
    ("a log is a link", linked("logs/up-0.log")),
    ("the logs are a link", linked("logs", "folder")),
    ("the samples are a link", linked("samples", "folder")),
    ("a file of samples is a link", linked("samples/step-1.jsonl")),
    ("the metrics are a link", linked("metrics", "folder")),
    ("the audit is a link", linked("audit", "folder")),
    ("records of the audit are a link", linked("audit/steps-1.msgpack")),
    ("the checkpoints are a link", linked("checkpoints", "folder")),
    ("a checkpoint is a link", linked("checkpoints/step-9", "folder")),
    ("a file of the weights is a link", linked("checkpoints/step-2/hf/config.json")),
    ("a file that the manifest does not list is a link", linked("checkpoints/step-2/hf/more.json")),
    ("the weights are a link", linked("checkpoints/step-2/hf", "folder")),
    ("a file of tensors is a link", linked("checkpoints/step-2/policy/weights/state/more.safetensors")),
    ("COMPLETE is a link", linked("checkpoints/step-2/COMPLETE")),
    ("the manifest lists an absolute path", listed("{outside}/secret.txt")),
    ("the manifest lists a path that leaves it", listed("../../../../outside/secret.txt")),
    ("the manifest lists a device", listed("/dev/zero")),
    ("the manifest lists a name with a line break", listed("hf/a\nb")),
    # Pipes, which block, and other kinds of files.
    ("run.json is a pipe", piped("run.json")),
    ("run.json of a run beside it is a pipe", lambda directory: piped("run.json")(directory.parent / "sibling")),
    ("config.yaml is a pipe", piped("config.yaml")),
    ("steps.jsonl is a pipe", piped("steps.jsonl")),
    ("summary.json is a pipe", piped("summary.json")),
    ("the lock is a pipe", piped("lock")),
    ("a log is a pipe", piped("logs/up-0.log")),
    ("a file of samples is a pipe", piped("samples/step-1.jsonl")),
    ("records of the audit are a pipe", piped("audit/steps-1.msgpack")),
    ("the manifest is a pipe", piped("checkpoints/step-2/manifest.json")),
    ("a file in a checkpoint is a pipe", piped("checkpoints/step-2/hf/pipe")),
    ("leftovers of a killed writer are pipes", lambda directory: [
        os.mkfifo(directory / f"{name}.0000aaaa.tmp") for name in ("run.json", "report.html", "lineage.json")
    ] and None),
    ("run.json is a socket", bound("run.json")),
    ("a file in a checkpoint is a socket", bound("checkpoints/step-2/hf/socket")),
    ("steps.jsonl is a folder", lambda directory: removed(directory, "steps.jsonl").mkdir()),
    ("run.json is a folder", lambda directory: removed(directory, "run.json").mkdir()),
    ("the samples are a file", lambda directory: removed(directory, "samples").touch()),
    ("the checkpoints are a file", lambda directory: removed(directory, "checkpoints").touch()),
    # Sizes.
    ("run.json has 1 TB", sparse("run.json")),
    ("config.yaml has 1 TB", sparse("config.yaml")),
    ("steps.jsonl has 1 TB", sparse("steps.jsonl")),
    ("records of the audit have 1 TB", sparse("audit/steps-1.msgpack")),
    ("a file of a checkpoint has 1 TB", sparse("checkpoints/step-2/hf/config.json")),
    ("a line of 20 MB", appended("steps.jsonl", b'{"step":' + b" " * 20_000_000 + b"1}\n")),
    ("a line of 20 MB that does not end", appended("steps.jsonl", b"1" * 20_000_000)),
    ("samples of 20 MB in a line", appended("samples/step-1.jsonl", b"[" + b"1," * 10_000_000 + b"1]\n")),
    ("spans of 10^12 tokens", sampled(version_spans=[[0, HUGE]])),
    ("spans that add up with a negative one", sampled(version_spans=[[0, HUGE], [1, 2 - HUGE]])),
    ("trained spans of 10^12 tokens", sampled(trained_spans=[[True, HUGE]])),
    ("turns of 10^12 tokens", sampled(turns=[[HUGE, 2]])),
    ("turns of a negative number of tokens", sampled(turns=[[-HUGE, HUGE + 2]])),
    ("spans without tokens", sampled(tokens=[], version_spans=[[0, HUGE]], trained_spans=[[True, HUGE]])),
    ("fewer log-probs than tokens", sampled(prev_logprobs=[-0.5])),
    ("a staleness of 10^8 versions", stepped(token_staleness={"100000000": 1}, group_staleness={"3": 1})),
    ("a staleness of 10^30 versions", stepped(token_staleness={str(10**30): 1})),
    ("a negative staleness", stepped(group_staleness={"-100000000": 1})),
    ("a step of 10^300", stepped(step=10**300)),
    ("times that are not finite together", stepped(wall_s=1.7e308, duration_s=-1.7e308)),
    ("a step at -1.7e308 s", stepped(wall_s=-1.7e308)),
    ("numbers of 1e308", stepped(reward_mean=1.7e308, loss=-1.7e308, diagnostics={"clipped_ratio": 1e308})),
    ("10^300 groups", stepped(ledger_groups={"trained": 10**300}, buffer_groups={"ready": -(10**300)})),
    ("10^12 filtered samples", filtered),
    ("a frame of 4 GiB", appended("audit/steps-1.msgpack", struct.pack("<IQ", 2**32 - 1, 0) + b"1" * 100)),
    ("a record that is a list of 4 billion", framed(b"\xdd\xff\xff\xff\xff\x01")),
    ("a record that is nested", framed(b"\x91" * 200_000 + b"\x01")),
    ("a step of the audit with other types", framed(msgspec.msgpack.encode(["step", 1, None, "a"]))),
    # Text.
    ("run.json is nested", lambda directory: written("run.json", b'{"x":' + b"[" * 200_000)(directory)),
    ("steps.jsonl is nested", deep("steps.jsonl")),
    ("a sample is nested", deep("samples/step-1.jsonl")),
    ("summary.json is nested", written("summary.json", b"[" * 200_000)),
    ("the manifest is nested", written("checkpoints/step-2/manifest.json", b"[" * 200_000)),
    ("COMPLETE is a number", written("checkpoints/step-2/COMPLETE", b"1")),
    ("run.json is not UTF-8", lambda directory: edit_bytes(directory / "run.json", b'"evil"', b'"\xff\xfe"')),
    ("steps.jsonl is not UTF-8", appended("steps.jsonl", b'{"step": 3, "\xff": 1}\n')),
    ("config.yaml is not UTF-8", appended("config.yaml", b"\nx: \xff\xfe\n")),
    ("a pid that no process has", lambda directory: edit_info(directory, pid=10**30)),
    ("a pid below 0", lambda directory: edit_info(directory, pid=-1)),
    ("a start that is not a time", lambda directory: edit_info(directory, started="yesterday")),
    ("an end in the year 9999", lambda directory: edit_info(directory, finished="9999-12-31T23:59:59-23:59")),
    ("a restart in the year 1", lambda directory: edit_info(
        directory, resumed=[{"at": "0001-01-01T00:00:00+23:59", "step": 10**300, "incarnation": -1}]
    )),
    ("a run's name of 10 MB", lambda directory: edit_info(directory, name="a" * 10**7)),
    ("aliases for 9^12 values", configured(bomb(merged=False))),
    ("merges of 9^12 keys", configured(bomb(merged=True))),
    ("an alias for itself", configured("\nx: &x {y: *x}\n")),
    ("aliases of a long text", configured(f"\nx: &x {'a' * 100_000}\ny: [{'*x, ' * 2000}*x]\n")),
    ("lists in lists in YAML", configured("\nx: " + "[" * 900 + "]" * 900 + "\n")),
    ("blocks in blocks in YAML", configured("\n" + "\n".join(" " * n + "a:" for n in range(500)) + "\n")),
    ("aliases in aliases in YAML", configured(
        "\nx:\n  a0: &a0 [1]\n" + "".join(f"  a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 500))
    )),
    ("12,000 values in YAML", configured("\nx: [" + "1," * 12_000 + "1]\n")),
    ("a number of 100,000 digits in YAML", configured(f"\nx: {'9' * 100_000}\n")),
    # Names.
    ("a file of samples with a long number", moved("samples/step-1.jsonl", f"samples/step-{'9' * 200}.jsonl")),
    ("a file of samples with other digits", moved("samples/step-1.jsonl", "samples/step-²٣.jsonl")),
    ("a checkpoint with a long number", moved("checkpoints/step-2", f"checkpoints/step-{'9' * 200}")),
    ("a checkpoint with other digits", moved("checkpoints/step-2", "checkpoints/step-٣")),
    ("records of the audit with a long number", moved("audit/steps-1.msgpack", f"audit/steps-{'9' * 200}.msgpack")),
    ("records of the audit with other digits", moved("audit/steps-1.msgpack", "audit/steps-٣.msgpack")),
    ("a name that is not UTF-8", lambda directory: os.close(
        os.open(os.fsencode(directory / "samples") + b"/step-\xff.jsonl", os.O_CREAT, 0o600)
    )),
    ("200 folders in folders", nested_folders),
    ("a lineage of another run", written("lineage.json", b'{"branches": [[7, 1], [-1, -5]]}')),
    ("a lineage that is a cycle", written("lineage.json", b'{"branches": [[2, 1], [3, 1], [2, 1]]}')),
]  # fmt: skip


def edit_bytes(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(old, new))
