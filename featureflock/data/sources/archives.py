"""Files of published data sets, in a folder or in an archive. Archives are read without extracting them."""

import contextlib
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

Arrays = dict[str, NDArray[np.uint8]]
"""train_x and test_x (N, H, W, C), train_y and test_y (N,)."""

_MAX_BYTES = 1 << 30  # no published file is larger, decompressed or not


@dataclass(frozen=True)
class DataFile:
    """The content of a file, and its path for messages, including the path within an archive."""

    path: str
    data: bytes


@dataclass(frozen=True)
class FileLayout:
    """The files of a data set in one published format."""

    files: tuple[str, ...]
    folders: tuple[str, ...]
    """Where the files may be, relative to the folder that the user gives."""
    archive: str
    """Name of the archive that contains them, as a glob pattern."""
    read: Callable[[Mapping[str, DataFile], tuple[int, int, int], int], Arrays]
    """Reads arrays from files, given (H, W, C) and the number of classes; ValueError names a damaged file."""


def find_files(place: Path, layouts: Sequence[FileLayout]) -> tuple[FileLayout, dict[str, DataFile]] | None:
    """Return the files of the first complete layout, None if there are none; ValueError if some are missing."""
    incomplete: list[str] = []
    for layout in layouts:
        for folder in [place / name for name in layout.folders] if place.is_dir() else []:
            spellings = ((name, folder / each) for name in layout.files for each in reversed(_spellings(name)))
            paths = {name: path for name, path in spellings if path.is_file()}
            if len(paths) == len(layout.files):
                with contextlib.ExitStack() as stack:
                    streams = {name: stack.enter_context(open(path, "rb")) for name, path in paths.items()}
                    return layout, {name: _read(stream, str(paths[name])) for name, stream in streams.items()}
            if paths:
                incomplete.append(_missing(folder, layout, paths))
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


def label_bytes(values: Iterable[Any], count: int, classes: int, path: str) -> NDArray[np.uint8]:
    """Return labels as bytes, after checking that there is one class number for each image."""
    try:
        labels = np.asarray(values)
    except ValueError:  # nested lists of different lengths
        labels = np.empty(0)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"{path} is damaged: its labels are not a list of integers.")
    if len(labels) != count:
        raise ValueError(f"{path} is damaged: it has {len(labels):,} labels for {count:,} images.")
    if count == 0:
        raise ValueError(f"{path} contains no images.")
    for label in (int(labels.min()), int(labels.max())):
        if not 0 <= label < classes:
            raise ValueError(f"{path} is damaged: it has a label {label}, and labels are from 0 to {classes - 1}.")
    return labels.astype(np.uint8)


def _spellings(name: str) -> tuple[str, ...]:
    """Names of a file: plain or gzipped, and with a dot instead of the hyphen of idx files."""
    dotted = name.replace("-idx", ".idx")
    return tuple(dict.fromkeys((name, f"{name}.gz", dotted, f"{dotted}.gz")))


def _missing(place: Path, layout: FileLayout, present: Iterable[str]) -> str:
    names = [name for name in layout.files if name not in set(present)]
    return f"{place} is incomplete: {', '.join(names)} {'is' if len(names) == 1 else 'are'} missing."


def _members(archive: Path, names: Sequence[str]) -> dict[str, DataFile]:
    """Read files from a tar archive by their base name, in any folder of it."""
    wanted = {spelling: name for name in names for spelling in _spellings(name)}
    files: dict[str, DataFile] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = wanted.get(member.name.rsplit("/", 1)[-1])
                stream = tar.extractfile(member) if name is not None and member.isfile() else None
                if name is not None and stream is not None and name not in files:
                    files[name] = _read(stream, f"{archive}/{member.name}")
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{archive} is truncated or damaged: it is not a complete tar archive.") from error
    return files


def _read(stream: IO[bytes], path: str) -> DataFile:
    """Read a file, and decompress it if it is a gzip file."""
    data = stream.read(_MAX_BYTES + 1)
    if data.startswith(b"\x1f\x8b"):
        try:
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(_MAX_BYTES + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is truncated or damaged: it is not a complete gzip file.") from error
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{path} has more than {_MAX_BYTES:,} bytes, which no file of this data set has.")
    return DataFile(path, data)
