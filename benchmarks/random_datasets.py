"""Random small dataset files, with their rows as the plainest reader there is (csv, json, pyarrow) reads them."""

import csv
import datetime
import decimal
import io
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("jsonl", "csv", "json", "jsonl of hf", "parquet")
TEXTS = (
    "007", "012", "1.50", "1e3", "TRUE", "false", "null", "NA", "nan", "None", "", " ", " a ", "a,b", 'say "x"', "a\nb",
    "é", "日本", "😀", "{x}", "\\n", "2024-01-02", "2024-01-02 03:04:05", "12:30", "99999999999999999999999", "0x10",
    "#1", "a\tb", "'", "a;b", "\u00a0", "\u2028", "<b>", "1_000", "∞", "-0", "a\r\nb", "\ufeffa", "[1]", '{"a": 1}',
)  # fmt: skip
NUMBERS = (0, 1, -1, 7, 2**31, 2**53 + 1, -(2**63), 2**63, 2**64, 10**30)
FLOATS = (0.0, -0.0, 0.1, 1.0, 2.5, 1e300, -1e-300, 1e22, 123456789.123456789, math.nan, math.inf)
OWN_NAMES = {"prompt": "question", "answer": "solution"}
EXTRA = ("level", "id", "unit", "tests", "note")


@dataclass(kw_only=True)
class Dataset:
    """A file, the settings that read it, and its rows as the plainest reader reads them. `readable` is False if the
    file is not in the encoding in which it is read."""

    kind: str
    path: Path
    data: dict[str, Any]
    rows: list[Any]
    readable: bool = True


def _value(draw: random.Random, kind: str) -> Any:
    """Returns a value of a type: `text`, `integer`, `float`, `truth`, `list`, `object`, `date`, `bytes` or `any`."""
    if kind == "any":
        kind = draw.choice(["text", "integer", "float", "truth", "list", "object"])
    match kind:
        case "text":
            return draw.choice(TEXTS) if draw.random() < 0.6 else f"text {draw.randrange(50)}"
        case "integer":
            return draw.choice(NUMBERS) if draw.random() < 0.3 else draw.randrange(100)
        case "float":
            return draw.choice(FLOATS[:-2] if draw.random() < 0.9 else FLOATS)
        case "truth":
            return draw.random() < 0.5
        case "list":
            return [draw.randrange(5) for _ in range(draw.randrange(3))]
        case "object":
            return {name: draw.randrange(5) for name in draw.sample("xyz", draw.randrange(1, 4))}
        case "date":
            return datetime.datetime(2024, 1, draw.randrange(1, 28))
        case "bytes":
            return bytes([draw.randrange(256)])
        case "decimal":
            return decimal.Decimal(draw.randrange(1000)) / 100
    raise ValueError(kind)


def _rows(
    draw: random.Random, *, kinds: Mapping[str, str], prompt: str, answer: str, nulls: float
) -> list[dict[str, Any]]:
    """Returns random rows, some of which are equal, or equal but for one value."""
    rows: list[dict[str, Any]] = []
    for number in range(draw.randrange(4, 30)):
        if rows and draw.random() < 0.15:
            row = dict(draw.choice(rows))
            if draw.random() < 0.5:
                changed = draw.choice([name for name in row if name != prompt])
                row[changed] = _value(draw, kinds[changed])
        else:
            row = {
                name: _prompt(draw, number, kind) if name == prompt else _value(draw, kind)
                for name, kind in kinds.items()
            }
        for name in row:
            if draw.random() < (nulls if name not in (prompt, answer) else nulls / 5):
                row[name] = None
        rows.append(row)
    return rows


def _prompt(draw: random.Random, number: int, kind: str) -> Any:
    if kind == "messages":
        turns = [{"role": "user", "content": f"q{number} {draw.choice(TEXTS)}"}]
        if draw.random() < 0.3:
            turns.insert(0, {"role": "system", "content": "Be brief."})
        if draw.random() < 0.3:
            turns.append({"role": "assistant", "content": draw.choice(TEXTS)})
        return turns
    if draw.random() < 0.2:
        return _value(draw, "text")
    return f"{draw.choice(TEXTS)} q{number if draw.random() < 0.8 else 0}"


def made(seed: int, folder: Path) -> Dataset:
    """Writes the dataset of a seed into `folder`."""
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    own_names = draw.random() < 0.4
    prompt, answer = (OWN_NAMES["prompt"], OWN_NAMES["answer"]) if own_names else ("prompt", "answer")
    types = ["text", "integer", "float", "truth", "list", "object"]
    if kind == "csv":
        types = ["text", "integer", "float", "truth"]
    elif kind == "parquet":
        types += ["date", "bytes", "decimal"] if draw.random() < 0.3 else []
    elif draw.random() < 0.3:
        types.append("any")
    answers = ["text"] * 3 + ["integer"] + (["any"] if "any" in types else [])
    kinds = {prompt: "text", answer: draw.choice(answers)}
    if kind != "csv" and draw.random() < 0.15:
        kinds[prompt] = "messages"
    kinds |= {name: draw.choice(types) for name in draw.sample(EXTRA, draw.randrange(len(EXTRA)))}
    rows = _rows(draw, kinds=kinds, prompt=prompt, answer=answer, nulls=draw.choice([0, 0, 0.1, 0.4]))
    data: dict[str, Any] = {
        "on_bad_row": draw.choice(["skip", "skip", "refuse"]),
        "heldout_fraction": draw.choice([0, 0, 0.25]),
    }
    if own_names:
        data["columns"] = OWN_NAMES
    extra = [name for name in kinds if name not in (prompt, answer) and kinds[name] not in ("list", "object", "bytes")]
    if extra and kinds[prompt] == "text" and draw.random() < 0.4:
        data["prompt_template"] = draw.choice(["{question} [%s]", "%s: {question}"]).replace(
            "%s", f"{{{draw.choice(extra)}}}"
        )
    return _written(draw, kind, rows, data=data, folder=folder, columns=list(kinds))


ENCODINGS = ("utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1")


def _written(
    draw: random.Random,
    kind: str,
    rows: list[dict[str, Any]],
    *,
    data: dict[str, Any],
    folder: Path,
    columns: Sequence[str],
) -> Dataset:
    end = {"jsonl of hf": "jsonl"}.get(kind, kind)
    path = folder / f"rows.{end}"
    data |= {"dataset": "jsonl" if kind == "jsonl" else "hf", "path": str(path)}
    if kind == "parquet":
        return Dataset(kind=kind, path=path, data=data, rows=_parquet(rows, columns, path))
    encoding = draw.choice(ENCODINGS)
    text = _csv(draw, rows, columns) if kind == "csv" else _json(draw, rows, lines=end == "jsonl")
    try:
        content = text.encode(encoding)
    except UnicodeEncodeError:
        encoding, content = "utf-8", text.encode()
    path.write_bytes(content)
    read_as = "utf-8"
    if kind != "jsonl" and draw.random() < 0.5:
        read_as = encoding
        data["options"] = {"encoding": encoding}
    try:
        found = content.decode("utf-8-sig" if read_as == "utf-8" else read_as)
        readable = True
    except UnicodeDecodeError:
        found, readable = text, False
    plain = _read_csv(found) if kind == "csv" else _read_json(found, lines=end == "jsonl")
    return Dataset(kind=kind, path=path, data=data, rows=plain, readable=readable)


def _csv(draw: random.Random, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    file = io.StringIO(newline="")
    quoting = draw.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
    end = draw.choice(["\n", "\r\n"])
    writer = csv.DictWriter(file, columns, lineterminator=end, quoting=quoting)
    writer.writeheader()
    blank = draw.random() < 0.1
    for row in rows:
        writer.writerow(row)
        if blank and draw.random() < 0.2:
            file.write(end)
    return file.getvalue()


def _read_csv(text: str) -> list[Any]:
    head, *rows = csv.reader(io.StringIO(text, newline=""))
    return [dict(zip(head, [cell or None for cell in row], strict=True)) for row in rows if row]


def _json(draw: random.Random, rows: Sequence[dict[str, Any]], *, lines: bool) -> str:
    sparse = draw.random() < 0.3
    rows = [{name: value for name, value in row.items() if value is not None} if sparse else row for row in rows]
    ascii_only = draw.random() < 0.5
    written = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    form = "lines" if lines else draw.choice(["list", "list", "indented", "lines"])
    if form == "indented":
        return json.dumps(rows, ensure_ascii=ascii_only, indent=2)
    return "\n".join(written) + "\n" if form == "lines" else f"[{', '.join(written)}]"


def _read_json(text: str, *, lines: bool) -> list[Any]:
    lines = lines or not text.startswith("[")
    return [json.loads(line) for line in text.split("\n") if line] if lines else json.loads(text)


def _parquet(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], path: Path) -> list[Any]:
    import pyarrow
    import pyarrow.parquet

    arrays = {}
    for name in columns:
        values = [row.get(name) for row in rows]
        try:
            arrays[name] = pyarrow.array(values)
        except (pyarrow.ArrowException, OverflowError):
            arrays[name] = pyarrow.array([None if value is None else str(value) for value in values])
    pyarrow.parquet.write_table(pyarrow.table(arrays), path)
    return pyarrow.parquet.read_table(path).to_pylist()
