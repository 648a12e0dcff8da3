"""Write a corrupted set, file by file.

Each file is written atomically and then entered in the manifest with its digest. Files that are entered and intact are
not generated again, so an interrupted set is resumed.
"""

import hashlib
import io
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featureflock.corruptions.apply import CORRUPTIONS
from featureflock.corruptions.files import FORMAT, MANIFEST, VERSION, read_manifest
from featureflock.utils.files import clear_partials, write_atomically
from featureflock.utils.progress import ProgressCallback


@dataclass(frozen=True)
class SetWriter:
    """A set of `count` images for each severity, of one shape, to be written into a folder."""

    folder: Path
    count: int
    shape: tuple[int, ...]
    origins: dict[str, str]
    """The corruptions, each with the material that it is made from if this differs between machines, else \"\"."""
    severities: tuple[int, ...]
    metadata: dict[str, Any]
    """Further entries of the manifest, equal for equal sets."""

    def prepare(self, labels: NDArray[Any], log: Callable[[str], None]) -> list[str]:
        """Create the folder, write the labels, and return the corruptions that are still missing."""
        if labels.shape != (self.count,) or labels.dtype.kind not in "iu" or not self.count:
            raise ValueError(f"Each of {self.count} images needs a label; got {labels.dtype} of shape {labels.shape}.")
        if int(labels.min()) < 0 or int(labels.max()) > 255:
            raise ValueError("Labels must be from 0 to 255, because the published layout stores them as bytes.")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            clear_partials(self.folder)
            manifest = self._matching_manifest()
            all_labels = np.tile(labels.astype(np.uint8), len(self.severities))
            write_atomically(self.folder / "labels.npy", _header(all_labels.shape) + all_labels.tobytes())
        except OSError as error:
            raise OSError(f"{self.folder} cannot be used ({error.strerror}); give another folder.") from error
        return [name for name in self.origins if not self._is_finished(name, manifest, log)]

    def write(self, missing: list[str], blocks: Callable[[str], Iterator[bytes]], progress: ProgressCallback) -> None:
        """Write the missing files from blocks of bytes; `progress` counts images, including those already present."""
        per_file = self.count * len(self.severities)
        total = per_file * len(self.origins)
        for k, name in enumerate(missing):
            done, sha = total - per_file * (len(missing) - k), hashlib.sha256()

            def content(name: str = name, done: int = done, sha: Any = sha) -> Iterator[bytes]:
                header = _header((per_file, *self.shape))
                size = -len(header)
                for block in chain([header], blocks(name)):
                    sha.update(block)
                    yield block
                    size += len(block)
                    progress(done + size // math.prod(self.shape), total, name)

            write_atomically(self.folder / f"{name}.npy", content())
            manifest = read_manifest(self.folder) or {}
            manifest["files"][f"{name}.npy"] = {"sha256": sha.hexdigest(), "from": self.origins[name]}
            self._write_manifest(manifest)

    def _matching_manifest(self) -> dict[str, Any]:
        """Return the manifest, created if there is none; raise ValueError if it belongs to another set."""
        expected = {"format": FORMAT, "version": VERSION, "severities": list(self.severities), **self.metadata}
        manifest = read_manifest(self.folder)
        if manifest is None:
            others = sorted(path.name for path in self.folder.glob("*.npy") if path.stem in (*CORRUPTIONS, "labels"))
            if others:
                raise ValueError(f"{self.folder / others[0]} was not made by featureflock; give another folder.")
            manifest = expected | {"files": {}}
            self._write_manifest(manifest)
        for key in (*expected, *manifest):
            if key != "files" and (got := manifest.get(key)) != (want := expected.get(key)):
                raise ValueError(f"{self.folder} contains another set ({key}: {got}, not {want}); give another folder.")
        return manifest

    def _is_finished(self, name: str, manifest: dict[str, Any], log: Callable[[str], None]) -> bool:
        path, entry, origin = self.folder / f"{name}.npy", manifest["files"].get(f"{name}.npy"), self.origins[name]
        if entry is None or not path.is_file():
            return False
        if entry["from"] != origin:
            log(f"{path.name} was made from {entry['from']}; generating it again from {origin}.")
            return False
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"]:
                return True
        log(f"{path.name} is damaged; generating it again.")
        return False

    def _write_manifest(self, manifest: dict[str, Any]) -> None:
        write_atomically(self.folder / MANIFEST, (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode())


def _header(shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return stream.getvalue()
