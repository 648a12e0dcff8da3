"""A folder that a set of corrupted pictures is written into, file by file.

Each file is written whole or not at all, and then entered in featureflock.json with its digest. What is entered and
sound is not made again, so that an interrupted set is gone on with.
"""

import functools
import hashlib
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featureflock.corruptions.apply import CORRUPTIONS, Name
from featureflock.corruptions.files import FORMAT, MANIFEST, VERSION, read_manifest
from featureflock.data.sources.download import DownloadProgress
from featureflock.utils.files import clear_partials, write_atomically


@dataclass(frozen=True)
class SetPlan:
    """A folder, and what is to be in it."""

    folder: Path
    count: int
    """Pictures a severity."""
    shape: tuple[int, ...]
    """Of a picture."""
    origins: dict[Name, str]
    """The corruptions, and what each is made from where that can vary from one machine to the other, else \"\"."""
    severities: tuple[int, ...]
    about: dict[str, Any]
    """What else must be equal for a set to be the same."""

    def begin(self, labels: NDArray[Any], log: Callable[[str], None]) -> list[Name]:
        """Write the labels, and return the corruptions that are not there yet."""
        _check_labels(labels, self.count)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            clear_partials(self.folder)
            manifest = self._compared()
            all_labels = np.tile(labels.astype(np.uint8), len(self.severities))
            write_atomically(self.folder / "labels.npy", _header(all_labels.shape) + all_labels.tobytes())
        except OSError as error:
            raise OSError(f"{self.folder} cannot be used ({error.strerror}); give another folder.") from error
        return [name for name in self.origins if not self._finished(name, manifest, log)]

    def write(self, missing: list[Name], blocks: Callable[[Name], Iterator[bytes]], progress: DownloadProgress) -> None:
        """Write files, entering each when it is whole. `progress` counts pictures, and those that were there first."""
        a_file = self.count * len(self.severities)
        total = a_file * len(self.origins)
        for k, name in enumerate(missing):
            before, sha = total - a_file * (len(missing) - k), hashlib.sha256()
            chunks = self._watched(blocks(name), functools.partial(_tell, progress, before, total, name))
            write_atomically(self.folder / f"{name}.npy", _digested(chunks, sha))
            manifest = read_manifest(self.folder) or {}
            manifest["files"][f"{name}.npy"] = {"sha256": sha.hexdigest(), "from": self.origins[name]}
            self._enter(manifest)

    def _compared(self) -> dict[str, Any]:
        """What featureflock.json says, after a look whether it is of this set; begun if there is none."""
        wanted = {"format": FORMAT, "version": VERSION, "severities": list(self.severities), **self.about}
        manifest = read_manifest(self.folder)
        if manifest is None:
            foreign = sorted(path.name for path in self.folder.glob("*.npy") if path.stem in (*CORRUPTIONS, "labels"))
            if foreign:
                raise ValueError(f"{self.folder / foreign[0]} was not made by featureflock; give another folder.")
            manifest = wanted | {"files": {}}
            self._enter(manifest)
        for key in (*wanted, *manifest):
            if key != "files" and manifest.get(key) != wanted.get(key):
                raise ValueError(
                    f"{self.folder} holds another set ({key}: {manifest.get(key)}, not {wanted.get(key)}); "
                    "give another folder."
                )
        return manifest

    def _watched(self, blocks: Iterable[bytes], tell: Callable[[int], None]) -> Iterator[bytes]:
        """The content of a file, telling how many pictures of it there are."""
        tell(0)
        yield _header((self.count * len(self.severities), *self.shape))
        size = 0
        for block in blocks:
            yield block
            size += len(block)
            tell(size // math.prod(self.shape))

    def _finished(self, name: Name, manifest: dict[str, Any], log: Callable[[str], None]) -> bool:
        path, entry, origin = self.folder / f"{name}.npy", manifest["files"].get(f"{name}.npy"), self.origins[name]
        if entry is None or not path.is_file():
            return False
        if entry["from"] != origin:
            log(f"{path.name} was made from {entry['from']}; making it again from {origin}.")
            return False
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"]:
                return True
        log(f"{path.name} is damaged; making it again.")
        return False

    def _enter(self, manifest: dict[str, Any]) -> None:
        write_atomically(self.folder / MANIFEST, (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode())


def _check_labels(labels: NDArray[Any], count: int) -> None:
    if labels.shape != (count,) or labels.dtype.kind not in "iu" or not count:
        raise ValueError(
            f"There must be a label for each of {count} pictures; got {labels.dtype} of shape {labels.shape}."
        )
    if int(labels.min()) < 0 or int(labels.max()) > 255:
        raise ValueError("Labels must be from 0 to 255, for the published layout has them as bytes.")


def _tell(progress: DownloadProgress, before: int, total: int, name: Name, done: int) -> None:
    progress(before + done, total, name)


def _digested(chunks: Iterable[bytes], sha: "hashlib._Hash") -> Iterator[bytes]:
    for chunk in chunks:
        sha.update(chunk)
        yield chunk


def _header(shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return stream.getvalue()
