"""How published data sets lie on disk: which files, in which folder or archive. Archives are read, never extracted."""

import gzip
import io
import tarfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

Raw = dict[str, NDArray[np.uint8]]
"""train_x and test_x (N, H, W, C), train_y and test_y (N,)."""

_LARGEST = 1 << 30
"""No file of these sets has more bytes; one that claims to is not worth the memory."""


@dataclass(frozen=True)
class DataFile:
    path: str
    """For sentences: where it is, also within an archive."""
    data: bytes


@dataclass(frozen=True)
class FileLayout:
    files: tuple[str, ...]
    folders: tuple[str, ...]
    """Where the files may be, seen from the folder that the user names."""
    archive: str
    """The name of the archive that holds them, as a glob."""
    read: Callable[[Mapping[str, DataFile], tuple[int, int, int], int], Raw]
    """From files, (H, W, C) and the number of classes to arrays; a ValueError names the file that is wrong."""


def find(place: Path, layouts: Sequence[FileLayout]) -> tuple[FileLayout, dict[str, DataFile]] | None:
    """The files of the first layout that is complete in a folder or an archive; None if there is nothing like it.

    A ValueError names what is missing if files of a layout are there, but not all.
    """
    incomplete: list[str] = []
    for layout in layouts:
        for folder in [place / name for name in layout.folders] if place.is_dir() else []:
            paths = {name: _existing(folder, name) for name in layout.files}
            complete = {name: path for name, path in paths.items() if path is not None}
            if len(complete) == len(paths):
                return layout, {name: _read(path) for name, path in complete.items()}
            if complete:
                incomplete.append(_missing(folder, layout, complete))
    for layout in layouts:
        for archive in sorted(place.glob(layout.archive)) if place.is_dir() else [place]:
            files = _members(archive, layout.files)
            if len(files) == len(layout.files):
                return layout, {name: files[name] for name in layout.files}
            if files:
                incomplete.append(_missing(archive, layout, files))
    if incomplete:
        raise ValueError(incomplete[0])
    return None


def checked_file_labels(values: Iterable[Any], count: int, classes: int, path: str) -> NDArray[np.uint8]:
    """Labels as bytes, one for each picture, each the number of a class."""
    try:
        labels = np.asarray(values)
    except ValueError:  # lists of several lengths
        labels = np.empty(0)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"{path} is damaged: its labels are not a list of whole numbers.")
    if len(labels) != count:
        raise ValueError(f"{path} is damaged: it has {len(labels):,} labels for {count:,} pictures.")
    if count == 0:
        raise ValueError(f"{path} holds no pictures.")
    if labels.min() < 0 or labels.max() >= classes:
        wrong = int(labels.min() if labels.min() < 0 else labels.max())
        raise ValueError(f"{path} is damaged: it has a label {wrong}, and labels are from 0 to {classes - 1}.")
    return labels.astype(np.uint8)


def _spellings(name: str) -> tuple[str, ...]:
    """Plain or gzipped; and some copies of idx files have a dot in place of the hyphen."""
    dotted = name.replace("-idx", ".idx")
    return tuple(dict.fromkeys((name, f"{name}.gz", dotted, f"{dotted}.gz")))


def _existing(folder: Path, name: str) -> Path | None:
    return next((path for each in _spellings(name) if (path := folder / each).is_file()), None)


def _missing(place: Path, layout: FileLayout, found: Iterable[str]) -> str:
    names = [name for name in layout.files if name not in set(found)]
    return f"{place} is incomplete: {', '.join(names)} {'is' if len(names) == 1 else 'are'} missing."


def _read(path: Path) -> DataFile:
    with open(path, "rb") as stream:
        return DataFile(str(path), _plain(_limited(stream, str(path)), str(path)))


def _members(archive: Path, names: Sequence[str]) -> dict[str, DataFile]:
    """Files of a tar archive by the last part of their name, wherever in it they are."""
    wanted = {spelling: name for name in names for spelling in _spellings(name)}
    files: dict[str, DataFile] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = wanted.get(member.name.rsplit("/", 1)[-1])
                stream = tar.extractfile(member) if name is not None and member.isfile() else None
                if name is not None and stream is not None and name not in files:
                    path = f"{archive}/{member.name}"
                    files[name] = DataFile(path, _plain(_limited(stream, path), path))
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{archive} is truncated or damaged: it is no whole tar archive.") from error
    return files


def _plain(data: bytes, path: str) -> bytes:
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
            return _limited(stream, path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is truncated or damaged: it is no whole gzip file.") from error


def _limited(stream: IO[bytes] | gzip.GzipFile, path: str) -> bytes:
    data = stream.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"{path} has more than {_LARGEST:,} bytes, which no file of this data set has.")
    return data
