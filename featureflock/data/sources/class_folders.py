"""A published data set as class folders of images: train/<class>/*.png and test/<class>/*.png.

File names and their order say nothing about the official order, so such copies are identified by the images of each
class alone, and stored in an order that is a function of the images (`unordered_digest`, `sort_by_digest`).
"""

import hashlib
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featureflock.data.sources.archives import Arrays, DataFile
from featureflock.data.sources.formats import read_image
from featureflock.utils.files import read_regular

_SPLITS = {"train": ("train",), "test": ("test", "val")}
_LOSSLESS = (".png", ".bmp", ".ppm", ".webp", ".tif", ".tiff")
_MAX_BYTES = 1 << 20  # of the file of an image
_LOSSY = (".jpg", ".jpeg", ".gif")


def read_class_folders(
    place: Path, title: str, class_names: tuple[str, ...], shape: tuple[int, int, int], counts: dict[str, int]
) -> Arrays | None:
    """Read a tree of class folders; None if the folder has none.

    Args:
        place: folder that contains train/ and test/ (or val/).
        title: name of the data set, for messages.
        class_names: in the order of the labels. A folder may have underscores in place of spaces.
        shape: (H, W, C) of an image.
        counts: number of images of each class in train and test.
    """
    parts = {split: [place / name for name in names if (place / name).is_dir()] for split, names in _SPLITS.items()}
    if not any(parts.values()):
        return None
    for split, names in _SPLITS.items():
        if not parts[split]:
            raise ValueError(f"{place} has no folder {' or '.join(names)}; class folders need train/ and test/.")
    arrays: Arrays = {}
    for split, (part, *_) in parts.items():
        folders = _class_folders(part, title, class_names)
        paths = [_images(folder, title, counts[split]) for folder in folders]  # all are counted before any is read
        images = [_read(path, shape) for group in paths for path in group]
        labels = np.repeat(np.arange(len(class_names), dtype=np.uint8), counts[split])
        arrays |= {f"{split}_x": np.stack(images), f"{split}_y": labels}
    return arrays


def image_digests(x: NDArray[np.uint8], y: NDArray[np.uint8], class_names: tuple[str, ...]) -> list[bytes]:
    """SHA-256 of (class name, 0, bytes H × W × C) of each image; class names have underscores in place of spaces."""
    prefixes = [folder_name(name).encode() + b"\0" for name in class_names]
    parts = (prefixes[label] + image.tobytes() for image, label in zip(x, y.tolist(), strict=True))
    return [hashlib.sha256(part).digest() for part in parts]


def unordered_digest(x: NDArray[np.uint8], y: NDArray[np.uint8], class_names: tuple[str, ...]) -> str:
    """SHA-256 of the sorted `image_digests`, which does not depend on the order of the images."""
    return hashlib.sha256(b"".join(sorted(image_digests(x, y, class_names)))).hexdigest()


def sort_by_digest(arrays: Arrays, class_names: tuple[str, ...]) -> Arrays:
    """The same images in the order of their `image_digests`, which mixes the classes."""
    result: Arrays = {}
    for split in _SPLITS:
        x, y = arrays[f"{split}_x"], arrays[f"{split}_y"]
        digests = image_digests(x, y, class_names)
        order = sorted(range(len(x)), key=digests.__getitem__)
        result |= {f"{split}_x": x[order], f"{split}_y": y[order]}
    return result


def folder_name(class_name: str) -> str:
    """Name of the folder of a class."""
    return class_name.replace(" ", "_")


def _class_folders(part: Path, title: str, class_names: tuple[str, ...]) -> list[Path]:
    """The folder of each class; ValueError if one is missing or there is another."""
    found = {folder_name(entry.name): Path(entry) for entry in os.scandir(part) if entry.is_dir()}
    found = {name: path for name, path in found.items() if not name.startswith(".")}
    wanted = [folder_name(name) for name in class_names]
    if not found:
        raise ValueError(f"{part} has no class folders; {title} needs {len(wanted)}, such as {part / wanted[0]}.")
    missing = [name for name in wanted if name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{part} is incomplete: the class folder {missing[0]}{more} of {title} is missing.")
    if extra := sorted(found.keys() - set(wanted)):
        raise ValueError(f"{found[extra[0]]} is not a class of {title}; remove the folder or give another tree.")
    return [found[name] for name in wanted]


def _images(folder: Path, title: str, count: int) -> list[Path]:
    """The image files of a class; ValueError unless there are `count`. Other files are ignored."""
    files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    images = [path for path in files if path.suffix.lower() in _LOSSLESS]
    if lossy := [path for path in files if path.suffix.lower() in _LOSSY]:
        what = f"{lossy[0]} is in a lossy format, so its pixels are not those of {title}"
        raise ValueError(f"{what}; give a tree of PNG files.")
    if len(images) != count:
        change = "missing" if len(images) < count else "too many"
        got = f"{len(images):,} {'image' if len(images) == 1 else 'images'}"
        raise ValueError(
            f"{folder} has {got} instead of the {count:,} of {title}: {abs(count - len(images)):,} {change}."
        )
    return images


def _read(path: Path, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    try:
        data = read_regular(path, max_bytes=_MAX_BYTES)
    except OSError as error:
        raise ValueError(str(error)) from error
    return read_image(DataFile(str(path), data), shape)
