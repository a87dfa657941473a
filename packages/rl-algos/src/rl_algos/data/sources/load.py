"""Rows of a dataset from files, the hub or a plugin."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from rl_algos import hub
from rl_algos.data.config import DatasetConfig
from rl_algos.data.rows.lazily import Lazily
from rl_algos.data.sources import remote
from rl_algos.data.sources.files import DataRows, Row, kind_of, kinds, read
from rl_core import resolve
from rl_core.config import did_you_mean
from rl_core.errors import DataError
from rl_core.plugins import DATASETS, DatasetPlugin, load_problem, names, plugin


def load_rows(settings: DatasetConfig, purpose: str) -> DataRows:
    """Load all rows of a dataset, in their order.

    Args:
        settings: Settings of the dataset: its path or name, and its split.
        purpose: `train` or `validation`; the split if the settings have none.

    Raises:
        DataError: With the file and line, or the dataset, and the remedy.
    """
    if settings.data_path is not None:
        rows = _read_path(settings.data_path, settings.split)
    else:
        load = _load_plugin if settings.dataset_name in names(DATASETS) else _load_hub
        rows = DataRows.named(load(settings, purpose), f"{settings.source} ({settings.split or purpose})")
    if not len(rows):
        raise DataError(f"the dataset {settings.source!r} has no rows; check its name and its `split`")
    return rows


def source_problem(settings: DatasetConfig) -> str:
    """Return why the files or the name of a dataset cannot be read, as far as is known without reading rows; empty if
    nothing is. The hub is asked for a name; object stores are not.
    """
    path = settings.data_path
    if settings.dataset_name in names(DATASETS):
        return load_problem(DATASETS, settings.dataset_name)
    if path is None:
        return _hub_problem(settings)
    place = Path(path).expanduser()
    if remote.is_remote(path) or _is_saved(place):
        return ""
    try:
        _local_files(place, settings.split)
    except DataError as error:
        return str(error)
    return ""


def settings_problem(settings: DatasetConfig) -> str:
    """Return why an installed dataset refuses its `settings`; empty if it takes them, or is not installed."""
    if settings.dataset_name in names(DATASETS) and not load_problem(DATASETS, settings.dataset_name):
        try:
            _plugin_settings(settings)
        except DataError as error:
            return str(error)
    return ""


def stream_rows(settings: DatasetConfig, purpose: str) -> Callable[[int], Iterator[Row]]:
    """Return a function from a number of rows to skip to the remaining rows of a hub dataset, read as they come.

    Raises:
        DataError: If the dataset is not on the hub, or its hub out of reach.
    """
    if settings.dataset_name in names(DATASETS):
        problem = f"`streaming` is for datasets on the hub, but {settings.dataset_name!r} is installed"
        raise DataError(f"{problem}. Remove `streaming`")
    opened = _load_hub(settings, purpose)
    return lambda skipped: iter(opened.skip(skipped) if skipped else opened)


def _load_plugin(settings: DatasetConfig, purpose: str) -> Sequence[Row]:
    name = settings.dataset_name
    assert name is not None
    if settings.subset is not None:
        raise DataError(f"`subset` is for datasets on the hub, but {name!r} is a plugin. Use `settings`")
    load, chosen = plugin(DATASETS, name).load, _plugin_settings(settings)
    try:
        found = resolve(load)
    except (ImportError, ValueError) as error:
        raise DataError(f"the dataset {name!r} cannot be loaded by {load}: {error}") from error
    rows: Sequence[Row] = found(chosen, settings.split or purpose)
    return rows


def _plugin_settings(settings: DatasetConfig) -> Mapping[str, Any]:
    """Return the settings of an installed dataset with their defaults, by the type that its plugin declares; as the
    user wrote them if it declares none.

    Raises:
        DataError: If one of them does not exist or has a wrong value.
    """
    assert settings.dataset_name is not None
    declared: DatasetPlugin = plugin(DATASETS, settings.dataset_name)
    if declared.settings is None:
        return settings.settings
    try:
        return declared.settings.model_validate(settings.settings).model_dump()
    except ValidationError as error:
        known = list(declared.settings.model_fields)
        problems = []
        for each in error.errors():
            key, got = ".".join(map(str, each["loc"])), f"(got {each['input']!r})"
            allowed = f"{did_you_mean(key, known)}; allowed: {', '.join(known) or 'none'}"
            is_unknown = each["type"] == "extra_forbidden"
            problems.append(f"{key}: no such setting {got}{allowed}" if is_unknown else f"{key}: {each['msg']} {got}")
        raise DataError(f"settings of the dataset {settings.dataset_name!r}: {'; '.join(problems)}") from None


def _hub_problem(settings: DatasetConfig) -> str:
    """Return why a dataset is neither installed nor available from the hub; empty if it is."""
    name = settings.dataset_name
    assert name is not None
    installed, near = ", ".join(names(DATASETS)), did_you_mean(name, names(DATASETS))
    if settings.settings:
        return f"`settings` is for installed datasets, and {name!r} is not one of them: {installed}{near}"
    if near and "/" not in name:
        on_hub = "one on the hub is named OWNER/NAME"
        return f"no dataset {name!r} is installed{near} Installed are {installed}; {on_hub}"
    if problem := hub.problem("dataset", name):
        return f"the dataset {name!r} is not an installed one ({installed}){near}, {problem}"
    return ""


def _load_hub(settings: DatasetConfig, purpose: str) -> Any:
    name = settings.dataset_name
    assert name is not None
    if problem := _hub_problem(settings):
        raise DataError(problem)
    # This imports pandas and pyarrow, which takes seconds; local files do not need it.
    import datasets

    split = settings.split or purpose
    # Offline, the library finds datasets that it has prepared once, but no download by name.
    path = str((hub.downloaded("dataset", name) if hub.is_offline() else None) or name)
    try:
        rows = datasets.load_dataset(path, settings.subset, split=split, streaming=settings.streaming)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        near = did_you_mean(name, names(DATASETS))
        raise DataError(
            f"the dataset {name!r} (split {split!r}) cannot be loaded: it is not installed{near}, and the hub reports: "
            f"{str(error).strip()}; check the name, `split` and `subset`, or set `data_path` to local files"
        ) from error
    return _undecoded(rows)


def _undecoded(rows: Any) -> Any:
    """Return rows of `datasets` with the bytes of their images, which it would decode otherwise."""
    import datasets

    def has_images(feature: Any) -> bool:
        if isinstance(feature, Mapping):
            return any(map(has_images, feature.values()))
        if isinstance(feature, list | tuple):
            return any(map(has_images, feature))
        return isinstance(feature, datasets.Image) or has_images(getattr(feature, "feature", ()))

    if rows.features is None or not has_images(rows.features):
        return rows
    if not isinstance(rows, datasets.Dataset):
        return rows.decode(False)
    tables = rows.with_format("arrow")
    return Lazily(len(rows), lambda index: tables[index].to_pylist()[0])


def _is_saved(place: Path) -> bool:
    """Return whether a folder was saved by `datasets`."""
    return (place / "dataset_dict.json").exists() or (place / "state.json").exists()


def _read_path(path: str, split: str | None) -> DataRows:
    if remote.is_remote(path):
        files, is_folder = remote.files(path, lambda name: bool(kind_of(name)))
        found = {file.name: file for file in files}
        chosen = [found[name] for name in _chosen(path, list(found), split, is_folder=is_folder)]
        return DataRows.of_files([read(remote.copied(file), file.url) for file in chosen])
    place = Path(path).expanduser()
    if _is_saved(place):
        return DataRows.named(_read_saved(place, split), f"{place} ({split})" if split else str(place))
    return DataRows.of_files([read(file) for file in _local_files(place, split)])


def _read_saved(folder: Path, split: str | None) -> Sequence[Row]:
    """Read a folder that `datasets` saved: a dataset, or several by split."""
    import datasets

    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise DataError(f"{folder} has the splits {', '.join(saved)}, got {split!r}; set `split` to one of them")
        saved = saved[split]
    elif split is not None:
        raise DataError(f"{folder} contains one dataset without splits, got split: {split!r}. Remove `split`")
    return cast("Sequence[Row]", _undecoded(saved))


def _local_files(place: Path, split: str | None) -> list[Path]:
    if place.is_dir():
        files = [file for file in sorted(place.rglob("*")) if file.is_file() and kind_of(file.name)]
        found = {file.relative_to(place).as_posix(): file for file in files}
    else:
        paths = [place] if place.is_file() else [Path(file) for file in sorted(glob.glob(str(place), recursive=True))]
        found = {str(file): file for file in paths}
    return [found[name] for name in _chosen(str(place), list(found), split, is_folder=place.is_dir())]


def _chosen(place: str, files: list[str], split: str | None, *, is_folder: bool) -> list[str]:
    """Return the names of the files to read. For a folder, these are the files of a split, and .json and .csv only if
    there is nothing else, as such files often describe the others."""
    if split is not None and not is_folder:
        raise DataError(f"`split` selects files of a folder, but {place!r} is not a folder. Remove `split`")
    if is_folder:
        files = [file for file in files if split is None or file.startswith(split)]
        files = [file for file in files if kind_of(file) not in (".json", ".csv")] or files
    if not files:
        chosen = f" whose names start with {split!r}" if split else ""
        raise DataError(f"no data at {place!r}: expected a file, a folder or a pattern with {kinds()} files{chosen}")
    if foreign := [file for file in files if not kind_of(file)]:
        raise DataError(f"cannot read {foreign[0]!r}: expected {kinds()}")
    return files
