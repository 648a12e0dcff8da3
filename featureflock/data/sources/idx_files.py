"""MNIST and its kin: idx files, a header of sizes and then bytes, gzipped or not."""

import math
import struct
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from featureflock.data.sources.archives import DataFile, FileLayout, Raw, checked_file_labels

_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_BYTES = 0x08
"""The code of unsigned bytes in an idx header."""


def idx_files(archive: str, *folders: str) -> FileLayout:
    return FileLayout(_FILES, (".", *folders), archive, _read)


def _read(files: Mapping[str, DataFile], shape: tuple[int, int, int], classes: int) -> Raw:
    raw: Raw = {}
    for split, images, labels in (("train", *_FILES[:2]), ("test", *_FILES[2:])):
        x = _array(files[images], 3)
        if x.shape[1:] != shape[:2]:
            got, want = (" × ".join(map(str, each)) for each in (x.shape[1:], shape[:2]))
            raise ValueError(f"{files[images].path} holds pictures of {got} pixels; {want} were expected.")
        raw[f"{split}_x"] = x[..., None]
        raw[f"{split}_y"] = checked_file_labels(_array(files[labels], 1), len(x), classes, files[labels].path)
    return raw


def _array(file: DataFile, dims: int) -> NDArray[np.uint8]:
    start = 4 + 4 * dims
    if len(file.data) < start or file.data[:4] != bytes((0, 0, _BYTES, dims)):
        raise ValueError(
            f"{file.path} is no idx file of bytes with {dims} {'dimension' if dims == 1 else 'dimensions'}."
        )
    shape = struct.unpack(f">{dims}I", file.data[4:start])
    if len(file.data) - start != math.prod(shape):
        raise ValueError(
            f"{file.path} is truncated or damaged: its header announces {math.prod(shape):,} bytes, "
            f"and {len(file.data) - start:,} follow."
        )
    return np.frombuffer(file.data, np.uint8, offset=start).reshape(shape)
