"""Rows of datasets that the library `datasets` reads: from the Hugging Face Hub, or from files."""

import inspect
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from asyncrl.data.json_files import JSON_OPTIONS, json_file_rows
from asyncrl.data.rows import Row
from asyncrl.errors import DatasetError

FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow"}
"""The known endings of file names, and the format of each, as `datasets` calls it."""

CSV_OPTIONS: Mapping[str, Any] = {"keep_default_na": False, "na_values": [""]}
"""Options with which only an empty cell of a CSV file is a missing value. `datasets` would also take `null` or `NA`."""

_SEPARATORS = (";", "\t", "|")
"""Separators of the cells of CSV files, beside the comma."""


def hugging_face_rows(source: str, *, subset: str | None, split: str, options: Mapping[str, Any]) -> Iterable[Row]:
    """Returns the rows of one split of a dataset.

    `source` is a dataset's name on the Hub (`openai/gsm8k`), a file or a folder of files in one of `FORMATS`, or a
    folder that `Dataset.save_to_disk` has written. `options` are further arguments of `datasets.load_dataset`. Raises
    DatasetError if the library is not installed, or cannot find or read the dataset; for a JSON file also while its
    rows are read.
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
        return _loaded(source, subset, split=split, options=options)
    except DatasetError:
        raise
    except Exception as error:  # the library raises errors of its own, of pyarrow, and of requests to the Hub
        which = f"data.path = {source}, data.subset = {subset}, data.split = {split}"
        raise DatasetError(f"{which}: cannot be read ({_described(error)}){_advice(error)}") from error


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _described(error: BaseException) -> str:
    """Returns the first line of an error and of its causes: `datasets` often names the reason only in a cause."""
    lines = [f"{type(each).__name__}: {' '.join(str(each).strip().splitlines()[:1])}" for each in _chain(error)]
    return "; ".join(dict.fromkeys(lines))


def _advice(error: BaseException) -> str:
    """Returns what to change after an error, if that is known; otherwise ""."""
    for each in _chain(error):
        if isinstance(each, UnicodeDecodeError):
            return "; the file is not UTF-8: set data.options: {encoding: latin-1}, or the encoding that it has"
        if "Error tokenizing data" in str(each):
            return (
                "; look at the quotes and the number of cells of that line: a quote inside of a quoted cell is written "
                "twice. If spaces follow the separators, set data.options: {skipinitialspace: true}"
            )
    return ""


def _loaded(source: str, subset: str | None, *, split: str, options: Mapping[str, Any]) -> Iterable[Row]:
    """Runs `datasets.load_dataset`. Unless `options` has `features`, each cell of a CSV file is a text, and JSON files
    are only found and downloaded by `datasets`, and read by `json_file_rows`.

    Without these two rules, pandas would infer the types of CSV columns from blocks of 10,000 rows: `007` becomes 7 in
    some blocks. And `datasets` would convert the values of JSON files to the types of columns (see `json_files.py`).
    """
    import datasets
    from datasets.packaged_modules.csv.csv import CsvConfig
    from datasets.packaged_modules.json.json import JsonConfig

    known = inspect.signature(datasets.load_dataset_builder).parameters
    only_loading = set(inspect.signature(datasets.load_dataset).parameters) - set(known)
    of_builder = {name: value for name, value in options.items() if name not in only_loading}
    builder = _builder(source, subset, options=of_builder)
    if isinstance(builder.config, JsonConfig) and builder.config.features is None:
        of_json = {name: getattr(builder.config, name) for name in JSON_OPTIONS}
        return json_file_rows(_downloaded(builder.config.data_files, options=options), split=split, options=of_json)
    if isinstance(builder.config, CsvConfig) and builder.config.features is None:
        names = _columns(builder.config, token=options.get("token"))
        texts = datasets.Features({name: datasets.Value("string") for name in names})
        options = {**CSV_OPTIONS, **options, "features": texts}
    return datasets.load_dataset(source, subset, split=split, **options)  # type: ignore[no-any-return]


def _builder(source: str, subset: str | None, *, options: Mapping[str, Any]) -> Any:
    """Returns the object with which `datasets` finds and reads a dataset. If the Hub does not answer, `datasets` would
    take the rows that it has cached, in which the values of JSON files have other types. In this case the returned
    object reads the files that were downloaded before, if they are still in the Hub's cache."""
    import datasets
    from datasets.packaged_modules.cache.cache import Cache

    builder = None
    try:
        builder = datasets.load_dataset_builder(source, subset, **options)
        if not isinstance(builder, Cache) or builder.info.builder_name != "json":
            return builder
    except Exception:
        if _snapshot(source, options.get("revision")) is None:
            raise
    if (folder := _snapshot(source, options.get("revision"))) is None:
        return builder
    # Names the files of the subset: otherwise `datasets` would also look for the files of the first subset, which may
    # not have been downloaded.
    own = _card(folder).get(subset, {}) if options.keys().isdisjoint(("data_files", "data_dir")) else {}
    where = {name: own[name] for name in ("data_files", "data_dir") if name in own}
    return datasets.load_dataset_builder(str(folder), subset, **{**options, **where, "revision": None})


def _card(folder: Path) -> Mapping[str | None, Mapping[str, Any]]:
    """Returns the settings of each subset in the card of a dataset, README.md; empty without a card or settings."""
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard, DatasetCardData

    file = folder / "README.md"
    data = DatasetCard.load(file).data if file.is_file() else DatasetCardData()
    return MetadataConfigs.from_dataset_card_data(data)  # type: ignore[no-any-return]


def _snapshot(source: str, revision: str | None) -> Path | None:
    """Returns the folder with the files of a dataset of the Hub in the cache of this machine; None if there is none."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return None
    for repository in repositories:
        if (repository.repo_type, repository.repo_id) == ("dataset", source):
            for found in repository.revisions:
                if (revision or "main") in (*found.refs, found.commit_hash):
                    return found.snapshot_path
    return None


def _downloaded(files: Mapping[str, Sequence[str]], *, options: Mapping[str, Any]) -> dict[str, list[Path]]:
    """Downloads the files of each split, and unpacks them if they are packed."""
    import datasets

    login = datasets.DownloadConfig(token=options.get("token"), cache_dir=options.get("cache_dir"))
    manager = datasets.DownloadManager(download_config=login)
    return {
        str(split): [Path(each) for each in manager.iter_files(manager.download_and_extract(list(names)))]
        for split, names in files.items()
    }


def _columns(config: Any, *, token: str | bool | None) -> Sequence[str]:
    """Returns the names of the columns of CSV files. Raises DatasetError if the files have different columns, if a
    header has a name twice or another separator, or if the first row of a file has more cells than its header: pandas
    would take the first cells as names of the rows."""
    import datasets
    import pandas
    from datasets.utils.file_utils import xpandas_read_csv

    login = datasets.DownloadConfig(token=token)
    head = {**config.pd_read_csv_kwargs, "chunksize": None, "nrows": 1, "dtype": str}
    names: list[str] = []
    for file in dict.fromkeys(chain.from_iterable((config.data_files or {}).values())):
        table = xpandas_read_csv(file, download_config=login, **head)
        found = list(map(str, table.columns))
        _check_header(file, found, config=config, login=login)
        if config.index_col is None and len(table) and not isinstance(table.index, pandas.RangeIndex):
            raise DatasetError(
                f"{file}: its first row has more cells than the {len(found)} columns of its header "
                f"({', '.join(found)}); correct the file, or name all columns with data.options.column_names"
            )
        if names and set(found) != set(names):
            raise DatasetError(
                f"{file}: has the columns {', '.join(found)}, but the files before it have {', '.join(names)}; give "
                "all files the same columns"
            )
        names = names or found
    return names


def _check_header(file: str, found: Sequence[str], *, config: Any, login: Any) -> None:
    """Raises DatasetError for a header with another separator than that of the configuration, or with a name twice."""
    from datasets.utils.file_utils import xpandas_read_csv

    other = next((mark for mark in _SEPARATORS if mark in found[0]), None)
    if len(found) == 1 and other is not None and config.pd_read_csv_kwargs.get("sep", ",") == ",":
        raise DatasetError(
            f"{file}: its header is one column, {found[0]!r}; if {other!r} separates the columns, set "
            f"data.options: {{delimiter: {json.dumps(other)}}}"
        )
    if config.header != "infer" or config.names is not None or config.column_names is not None:
        return
    plain = {**config.pd_read_csv_kwargs, "chunksize": None, "nrows": 1, "dtype": str, "header": None}
    counts = Counter(map(str, xpandas_read_csv(file, download_config=login, **plain).iloc[0].dropna()))
    if twice := [name for name, count in counts.items() if count > 1]:
        raise DatasetError(f"{file}: its header has {', '.join(twice)} more than once; give each column its own name")


def _saved(found: Any, *, split: str) -> Iterable[Mapping[str, Any]]:
    """Returns a split of a dataset that `save_to_disk` has written. `found` has several splits by name, or is one
    split without a name. This one is returned for every value of `split`."""
    if not isinstance(found, Mapping):
        return found  # type: ignore[no-any-return]
    if split not in found:
        raise DatasetError(f"data.split = {split}: the dataset has {', '.join(found)}; set data.split to one of these")
    return found[split]  # type: ignore[no-any-return]


def _of_files(path: Path, *, split: str, options: Mapping[str, Any]) -> Iterable[Row]:
    """Reads a file, or those files of a folder whose names end in one of `FORMATS`. All must have the same format. JSON
    files are read without `datasets`, unless `options` has options that only `datasets` supports."""
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
    known = FORMATS[files[0].suffix]
    names = [str(each) for each in files]
    # Files have no splits, so all files form the split that `split` names. It may also name a part (`train[:1000]`).
    plain = split.partition("[")[0]
    if known == "json" and options.keys() <= JSON_OPTIONS:
        return json_file_rows({plain: files}, split=split, options=options)
    return _loaded(known, None, split=split, options={**options, "data_files": {plain: names}})
