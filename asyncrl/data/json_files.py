"""Rows of JSON and JSON Lines files, with the values and the types that the files have.

The library `datasets` is not used for this, because it puts the rows into typed columns. A value is then converted to
the type of its column: with an integer of more than 64 bits, all integers of the column become floats, objects get the
keys of other rows, and -0.0 becomes 0.0.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, dropwhile
from pathlib import Path
from typing import Any, TextIO

import msgspec

from asyncrl.data.rows import BadRow, Row
from asyncrl.errors import DatasetError

JSON_OPTIONS = frozenset({"field", "encoding", "encoding_errors"})
"""The options of `datasets` for JSON files that this module supports."""


def json_file_rows(files: Mapping[str, Sequence[Path]], *, split: str, options: Mapping[str, Any]) -> Iterable[Row]:
    """Returns the rows of files with a list of objects, with one object whose values are columns (lists), or with one
    object a line. `files` has the files of each split by its name. `split` is the name of a split, or takes parts of
    splits (`train[:1000]+test`).

    A line that is not JSON is a BadRow, and blank lines are not rows. Raises ValueError for an unknown split, and
    DatasetError, also while the rows are read, for a file that is not JSON or not in the encoding of `options`.
    """
    rows = {name: chain.from_iterable(_rows_of(file, **options) for file in named) for name, named in files.items()}
    if split in rows:
        return rows[split]
    from datasets import ReadInstruction

    found = {name: list(of_split) for name, of_split in rows.items()}
    parts = ReadInstruction.from_spec("+".join(found) if split == "all" else split)
    lengths = {name: len(of_split) for name, of_split in found.items()}
    return [row for part in parts.to_absolute(lengths) for row in found[part.splitname][part.from_ : part.to]]


def _rows_of(
    file: Path, *, field: str | None = None, encoding: str = "utf-8", encoding_errors: str | None = None
) -> Iterator[Row]:
    # `utf-8-sig` also reads UTF-8 with a byte-order mark. Only \n ends a line: strings may contain other line breaks.
    codec = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    try:
        with file.open(encoding=codec, errors=encoding_errors, newline="\n") as text:
            yield from _rows_in(text, file, field=field)
    except UnicodeError as error:
        raise DatasetError(
            f"{file}: is not in the encoding {encoding} ({error}); name its encoding with data.options.encoding, for "
            "example {encoding: utf-16}"
        ) from error
    except LookupError as error:
        raise DatasetError(f"{file}: data.options.encoding = {encoding}: {error}") from error


def _rows_in(text: TextIO, file: Path, *, field: str | None) -> Iterator[Row]:
    lines = dropwhile(lambda line: not line.strip(), text)
    first = next(lines, "")
    is_lines = file.suffix == ".jsonl" and not first.lstrip().startswith("[")
    if field is None and (is_lines or isinstance(_line(first), Mapping)):
        for line in chain([first], lines):
            if line.strip():
                yield _line(line)
        return
    try:
        found = _parsed(first + "".join(lines))
    except ValueError as error:
        raise DatasetError(f"{file}: is neither JSON nor JSON Lines ({error}); correct the file") from error
    yield from _rows_of_document(found, file, field=field)


def _rows_of_document(found: Any, file: Path, *, field: str | None) -> Iterator[Row]:
    if field is not None:
        if not isinstance(found, Mapping) or field not in found:
            raise DatasetError(f"{file}: data.options.field = {field}: the file has no such key; correct the option")
        found = found[field]
    if isinstance(found, Mapping):
        columns = list(found.values())
        if columns and all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
            yield from (dict(zip(found, row, strict=True)) for row in zip(*columns, strict=True))
            return
        found = [found]
    if not isinstance(found, list):
        raise DatasetError(
            f"{file}: has a value of type {type(found).__name__}, not a list of objects; correct the file"
        )
    for row in found:
        yield {"text": row} if isinstance(row, str) else row


def _line(line: str) -> Any:
    """Returns the value of a line, or the BadRow that says why it has none."""
    try:
        return _parsed(line)
    except ValueError as error:
        return BadRow("bad_json", f"is not JSON ({error})")


def _parsed(text: str) -> Any:
    """Returns the value of a JSON text, in which numbers may be NaN or infinite, as Python's json writes them. Raises
    ValueError."""
    try:
        return msgspec.json.decode(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except msgspec.DecodeError:
        if "NaN" in text or "Infinity" in text:
            return json.loads(text)
        raise
