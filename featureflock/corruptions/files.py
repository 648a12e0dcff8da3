"""Corrupted sets on disk, in the published layouts.

    FOLDER/<corruption>.npy    uint8 (severities · N, H, W, 3): one block of N pictures a severity, in order
    FOLDER/labels.npy          uint8 (severities · N,): the labels, once a block

is CIFAR-10-C and CIFAR-100-C, with severities 1 to 5. A set made here has a featureflock.json beside them, which says
what was made, and its severities can be fewer. ImageNet-C is a tree of pictures,

    FOLDER/<corruption>/<severity>/<class>/*.JPEG
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featureflock.corruptions.apply import CORRUPTIONS, SEVERITIES, Name, known
from featureflock.corruptions.images import Bytes
from featureflock.data.examples import Normalisation, TensorExamples
from featureflock.data.image_files import class_names, read_classes
from featureflock.data.streaming import StreamedExamples

MANIFEST = "featureflock.json"
FORMAT, VERSION = "featureflock corruptions", 1


@dataclass(frozen=True, eq=False)
class CorruptedSet:
    """A folder of corrupted pictures in the layout of CIFAR-10-C; they stay on the disk until they are asked for."""

    folder: Path
    corruptions: tuple[Name, ...]
    """Those that are there, in the published order."""
    severities: tuple[int, ...]
    labels: Tensor
    """int64 (N,)."""
    source: str
    """Where it came from, in words."""

    def images(self, corruption: str, severity: int) -> Bytes:
        """uint8 (N, H, W, 3), mapped into memory and read-only."""
        if known(corruption) not in self.corruptions:
            raise ValueError(f"{self.folder} has no {corruption}.npy.")
        if severity not in self.severities:
            there_are = ", ".join(map(str, self.severities))
            raise ValueError(f"{self.folder} has the severities {there_are}; got {severity!r}.")
        path = self.folder / f"{corruption}.npy"
        array = _mapped(path)
        count = len(self.labels)
        if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3:
            raise ValueError(f"{path} holds {array.dtype} of shape {array.shape}; uint8 (N, H, W, 3) was expected.")
        if len(array) != count * len(self.severities):
            raise ValueError(
                f"{path} holds {len(array):,} pictures; {len(self.severities)} × {count:,} were expected by labels.npy."
            )
        block = self.severities.index(severity)
        return array[block * count : (block + 1) * count]

    def examples(self, corruption: str, severity: int, normalisation: Normalisation | None = None) -> TensorExamples:
        """The same in memory, to be measured on."""
        x = torch.from_numpy(np.array(self.images(corruption, severity))).permute(0, 3, 1, 2)
        return TensorExamples(x, self.labels, normalisation=normalisation)


def open_set(folder: Path) -> CorruptedSet:
    """What is in a folder: the published files, or those that `featureflock data corrupt` made."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}; give one that holds <corruption>.npy and labels.npy.")
    manifest = read_manifest(folder)
    severities = SEVERITIES if manifest is None else tuple(manifest["severities"])
    finished = None if manifest is None else manifest["files"]
    here = [name for name in CORRUPTIONS if (folder / f"{name}.npy").is_file()]
    corruptions = tuple(name for name in here if finished is None or f"{name}.npy" in finished)
    if not corruptions:
        raise FileNotFoundError(f"{folder} holds no corrupted pictures such as {CORRUPTIONS[0]}.npy.")
    path = folder / "labels.npy"
    labels = _mapped(path)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) % len(severities) or not len(labels):
        raise ValueError(f"{path} holds {labels.dtype} of shape {labels.shape}; {len(severities)} × N were expected.")
    blocks = np.array(labels, dtype=np.int64).reshape(len(severities), -1)
    if (blocks != blocks[0]).any():
        raise ValueError(f"{path} has other labels for some severities than for the first.")
    source = "published files" if manifest is None else manifest["source"]
    return CorruptedSet(folder, corruptions, severities, torch.from_numpy(blocks[0].copy()), source)


def read_imagenet_c(
    folder: Path,
    corruption: str,
    severity: int,
    *,
    classes: Sequence[str] | None = None,
    size: int = 224,
    workers: int = 0,
) -> StreamedExamples:
    """One corruption and severity of ImageNet-C. Its pictures have been cropped before, so they are not cropped again.

    Labels are places in `classes`, which should be the folders that a network was trained on; by default, those here.
    """
    part = folder / known(corruption) / str(severity)
    if severity not in SEVERITIES:
        raise ValueError(f"severity must be 1, 2, 3, 4 or 5; got {severity!r}.")
    if not part.is_dir():
        raise FileNotFoundError(f"There is no folder {part}; ImageNet-C is a tree corruption/severity/class.")
    here = class_names(part)
    unknown_name = sorted(set(here) - set(classes)) if classes is not None else []
    if unknown_name:
        raise ValueError(
            f"{part} has the class {unknown_name[0]}, which is not one of the {len(classes or ())} classes."
        )
    return read_classes(part, here if classes is None else classes, size=size, workers=workers, margin=1.0)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What featureflock says of a set that it made; None for other folders."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is no JSON; remove the folder and make the set again.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise ValueError(f"{path} is not of a set of corrupted pictures that this version of featureflock reads.")
    if not _sound(manifest):
        raise ValueError(f"{path} is damaged: something is missing in it; remove the folder and make the set again.")
    return manifest


def find_sets(folder: Path) -> list[Path]:
    """Those in a folder, by name, that hold a corrupted set or the beginnings of one."""
    inside = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return [path for path in inside if (path / MANIFEST).is_file() or (path / "labels.npy").is_file()]


def _sound(manifest: dict[str, Any]) -> bool:
    severities, files = manifest.get("severities"), manifest.get("files")
    if not isinstance(severities, list) or not severities or not all(s in SEVERITIES for s in severities):
        return False
    if not isinstance(files, dict) or not isinstance(manifest.get("source"), str):
        return False
    return all(isinstance(entry, dict) and {"sha256", "from"} <= entry.keys() for entry in files.values())


def _mapped(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no {path}; it belongs to the set.") from None
    except ValueError as error:
        raise ValueError(f"{path} is truncated or damaged: it is no whole .npy file.") from error
    return array
