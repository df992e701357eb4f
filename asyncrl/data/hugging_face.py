"""Rows of datasets that the library `datasets` reads: from the Hugging Face Hub, or from files."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import DatasetError

FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow"}
"""The file names' ends that are known, and the format of each, as `datasets` calls it."""


def hugging_face_rows(
    source: str, *, subset: str | None, split: str, options: Mapping[str, Any]
) -> Iterable[Mapping[str, Any]]:
    """Returns the rows of one split of a dataset.

    `source` is a dataset's name on the Hub (`openai/gsm8k`), a file or a folder of files in one of `FORMATS`, or a
    folder that `Dataset.save_to_disk` has written. `options` are further arguments of `datasets.load_dataset`. Raises
    DatasetError if the library is not installed, or cannot find or read the dataset.
    """
    try:
        import datasets
    except ImportError as error:
        raise DatasetError("data.dataset = hf: needs the package datasets; pip install 'asyncrl[hf]'") from error
    datasets.disable_progress_bars()
    path = Path(source)
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return _saved(datasets.load_from_disk(source), split=split)
        if path.exists() or path.suffix in FORMATS:
            return _of_files(path, split=split, options=options)
        return datasets.load_dataset(source, subset, split=split, **options)  # type: ignore[no-any-return]
    except DatasetError:
        raise
    except Exception as error:  # the library raises errors of its own, of pyarrow, and of requests to the Hub
        which = f"data.path = {source}, data.subset = {subset}, data.split = {split}"
        first = str(error).strip().splitlines()[:1]
        raise DatasetError(f"{which}: cannot be read ({type(error).__name__}: {' '.join(first)})") from error


def _saved(found: Any, *, split: str) -> Iterable[Mapping[str, Any]]:
    """Returns the split of what `save_to_disk` has written: one split without a name, or several by name."""
    if not isinstance(found, Mapping):
        return found  # type: ignore[no-any-return]
    if split not in found:
        raise DatasetError(f"data.split = {split}: the dataset has {', '.join(found)}; set data.split to one of these")
    return found[split]  # type: ignore[no-any-return]


def _of_files(path: Path, *, split: str, options: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Reads a file, or all files of a folder that have the same known end."""
    import datasets

    if not path.exists():
        raise DatasetError(f"data.path = {path}: there is no such file; name a file, a folder, or a dataset of the Hub")
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.suffix in FORMATS)
    ends = {FORMATS.get(each.suffix) for each in files}
    if not files or len(ends) > 1 or None in ends:
        found = ", ".join(sorted({each.suffix or each.name for each in files})) or "none"
        raise DatasetError(
            f"data.path = {path}: needs files of one format, whose names end in one of {', '.join(FORMATS)}; found "
            f"{found}"
        )
    [known] = ends
    names = [str(each) for each in files]
    # Files have no splits, so all of them are the one that was named; its part may be taken (`train[:1000]`).
    plain = split.partition("[")[0]
    return datasets.load_dataset(known, data_files={plain: names}, split=split, **options)  # type: ignore[no-any-return]
