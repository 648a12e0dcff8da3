"""The idx files of MNIST and Fashion-MNIST: a header of sizes, then bytes; gzipped or not."""

import math
import struct
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from featureflock.data.sources.archives import Arrays, DataFile, FileLayout, label_bytes

_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx_layout(archive: str, *folders: str) -> FileLayout:
    """Layout of the four idx files in one of the folders, or in an archive."""
    return FileLayout(_FILES, (".", *folders), archive, _read)


def _read(files: Mapping[str, DataFile], shape: tuple[int, int, int], classes: int) -> Arrays:
    arrays: Arrays = {}
    for split, images, labels in (("train", *_FILES[:2]), ("test", *_FILES[2:])):
        x = _array(files[images], 3)
        if x.shape[1:] != shape[:2]:
            got, want = (" × ".join(map(str, each)) for each in (x.shape[1:], shape[:2]))
            raise ValueError(f"{files[images].path} has images of {got} pixels; {want} were expected.")
        arrays[f"{split}_x"] = x[..., None]
        arrays[f"{split}_y"] = label_bytes(_array(files[labels], 1), len(x), classes, files[labels].path)
    return arrays


def _array(file: DataFile, dims: int) -> NDArray[np.uint8]:
    start = 4 + 4 * dims
    if len(file.data) < start or file.data[:4] != bytes((0, 0, 0x08, dims)):  # 0x08 means unsigned bytes
        raise ValueError(f"{file.path} is not an idx file of bytes in {dims}-D.")
    shape = struct.unpack(f">{dims}I", file.data[4:start])
    if (size := len(file.data) - start) != (declared := math.prod(shape)):
        raise ValueError(
            f"{file.path} is truncated or damaged: its header declares {declared:,} bytes; it has {size:,}."
        )
    return np.frombuffer(file.data, np.uint8, offset=start).reshape(shape)
