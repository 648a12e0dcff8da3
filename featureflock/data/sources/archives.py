"""Files of published data sets, in a folder or in an archive. Archives are read without extracting them.

Compressed files may expand to anything, so the size of what is read is limited.
"""

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

from featureflock.utils.files import open_regular

Arrays = dict[str, NDArray[np.uint8]]
"""train_x and test_x (N, H, W, C), train_y and test_y (N,)."""

MAX_BYTES = 1 << 28
"""The files of a published set, decompressed, and the content of its archive, have no more than this together."""
_MAX_MEMBERS = 10_000  # of an archive
_CHUNK = 1 << 20


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
                    streams = {name: stack.enter_context(open_regular(path)) for name, path in paths.items()}
                    found: dict[str, DataFile] = {}
                    for name, stream in streams.items():
                        found[name] = _read(stream, str(paths[name]), found)
                    return layout, found
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
    if isinstance(values, list) and not all(type(value) is int for value in values):
        values = ["not integers"]  # nested lists could be much larger as an array
    labels = np.asarray(values)
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
        with open_regular(archive) as file:
            magic = file.read(2)
            file.seek(0)
            content = gzip.GzipFile(fileobj=file) if magic == _GZIP else file
            with tarfile.open(fileobj=_BoundedFile(content, archive), mode="r:") as tar:
                for count, member in enumerate(tar):
                    if count == _MAX_MEMBERS:
                        raise ValueError(f"{archive} has more than {_MAX_MEMBERS:,} files; it is another archive.")
                    name = wanted.get(member.name.rsplit("/", 1)[-1])
                    stream = tar.extractfile(member) if name is not None and member.isfile() else None
                    if name is not None and stream is not None and name not in files:
                        files[name] = _read(stream, f"{archive}/{member.name}", files)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{archive} is truncated or damaged: it is not a complete tar archive.") from error
    return files


class _BoundedFile(io.BufferedIOBase):
    """The content of an archive, from which tarfile reads headers of any size that they declare."""

    def __init__(self, content: Any, archive: Path) -> None:
        self._content, self._archive = content, archive

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _CHUNK:
            raise tarfile.ReadError("a header is too large")
        self._check(self._content.tell() + size)
        return bytes(self._content.read(size))

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._check(offset)
        return int(self._content.seek(offset, whence))

    def tell(self) -> int:
        return int(self._content.tell())

    def _check(self, position: int) -> None:
        if position > MAX_BYTES:
            raise ValueError(f"{self._archive} expands to more than {MAX_BYTES:,} bytes; it is another archive.")


def _read(stream: IO[bytes], path: str, others: Mapping[str, DataFile]) -> DataFile:
    """Read a file, and decompress it if it is a gzip file; `others` are the files of the set that were read before."""
    limit = MAX_BYTES - sum(len(file.data) for file in others.values())
    data = _read_up_to(stream, limit + 1)
    if data.startswith(_GZIP):
        try:
            data = _read_up_to(gzip.GzipFile(fileobj=io.BytesIO(data)), limit + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is truncated or damaged: it is not a complete gzip file.") from error
    if len(data) > limit:
        raise ValueError(f"{path} is larger than all files of this data set, which have {MAX_BYTES:,} bytes at most.")
    return DataFile(path, data)


def _read_up_to(stream: IO[bytes] | gzip.GzipFile, size: int) -> bytes:
    """Read in pieces, so that memory grows with what is there."""
    data = bytearray()
    while len(data) < size and (piece := stream.read(min(_CHUNK, size - len(data)))):
        data += piece
    return bytes(data)


_GZIP = b"\x1f\x8b"
