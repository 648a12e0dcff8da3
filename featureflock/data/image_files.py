"""Image files in one folder per class, <class>/*.JPEG, as in ImageNet.

Training uses random resized crops (Szegedy et al., 2015): a window with 8 to 100 % of the image's area and an aspect
ratio of 3/4 to 4/3, log-uniform, resized to `size` and flipped with probability ½. Evaluation resizes the shorter side
to `size` · 256/224 and crops the centre.
"""

import hashlib
import math
import os
import stat
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from featureflock.data.augment import EpochKey
from featureflock.data.examples import Normalisation
from featureflock.data.rng import Stream, uniform
from featureflock.data.streaming import ExampleReader, StreamedExamples
from featureflock.utils.digests import file_version, once

IMAGENET_NORMALISATION = Normalisation.for_bytes((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and std of ImageNet's pixels."""

_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff", ".gif")
_HASHED_BYTES = 10**9  # folders of up to so many bytes are identified by their content: a second or two
_MARGIN = 256 / 224  # shorter side of the resized image, relative to the central crop


def class_names(part: Path) -> list[str]:
    """Return the names of the class folders, sorted; labels are positions in this list."""
    return sorted(e.name for e in os.scandir(part) if e.is_dir() and e.name[0] != ".")


def read_classes(
    part: Path, classes: Sequence[str], *, size: int, workers: int, margin: float = _MARGIN
) -> StreamedExamples:
    """Return the images of these classes; a class may have no folder."""
    paths, labels = [], []
    for label, name in enumerate(classes):
        files = [os.path.join(folder, file) for folder, _, names in os.walk(part / name) for file in names]
        images = sorted(os.path.relpath(file, part) for file in files if file.lower().endswith(_EXTENSIONS))
        paths += images
        labels += [label] * len(images)
    if not paths:
        raise FileNotFoundError(f"{part} contains no images; put them into {part / '<class>'}.")
    reader = ImageFiles(str(part), tuple(paths), size, margin)
    return StreamedExamples(reader, torch.tensor(labels), normalisation=IMAGENET_NORMALISATION, workers=workers)


@dataclass(frozen=True)
class ImageFiles(ExampleReader):
    """Decodes image files into uint8 (3, size, size)."""

    folder: str
    paths: tuple[str, ...]
    """Relative to the folder."""
    size: int
    margin: float = _MARGIN
    """Evaluation resizes the shorter side to size · margin; 1 for images that are already cropped."""

    def read(self, index: int, key: EpochKey | None) -> Tensor:
        path = self.name(index)
        if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would block
            raise ValueError("it is not a regular file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata, which is not used
            with Image.open(path) as file:
                image = to_rgb_image(file)
        if key is None:
            image, flip = centre_crop(image, self.size, self.margin), False
        else:
            keys = key.seed, key.epoch, index
            box = random_resized_crop(*image.size, *keys)
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
            flip = uniform(*keys, Stream.FILE_FLIP) < 0.5
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return pixels.flip(-1) if flip else pixels

    def name(self, index: int) -> str:
        return os.path.join(self.folder, self.paths[index])

    def digest(self) -> str:
        """SHA-256 of names and contents; of names, sizes and times in seconds if the files have more than 1 GB."""
        status = [_regular_status(self.name(k)) for k in range(len(self.paths))]
        if sum(each.st_size for each in status if each is not None) > _HASHED_BYTES:
            times = (f" {each.st_size} {each.st_mtime_ns // 10**9}" if each is not None else "" for each in status)
            return _text_digest(f"{path}{text}" for path, text in zip(self.paths, times, strict=True))
        versions = (file_version(each) if each is not None else "" for each in status)
        version = _text_digest(f"{path} {text}" for path, text in zip(self.paths, versions, strict=True))
        return once(("images", os.path.abspath(self.folder), version), self._content_digest)

    def _content_digest(self) -> str:
        return _text_digest(f"{path} {_file_digest(self.name(k))}" for k, path in enumerate(self.paths))

    def identity(self) -> str:
        return f"{self.digest()} {self.size} {self.margin}"


def _regular_status(path: str) -> os.stat_result | None:
    """Return the status of a regular file; None for other files and broken links, which cannot be read."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _file_digest(path: str) -> str:
    if _regular_status(path) is None:
        return ""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _text_digest(lines: Iterable[str]) -> str:
    sha = hashlib.sha256()
    for line in lines:
        sha.update(f"{line}\n".encode(errors="surrogateescape"))
    return sha.hexdigest()


def random_resized_crop(width: int, height: int, *keys: int) -> tuple[int, int, int, int]:
    """Return the window of a random resized crop; after ten attempts that do not fit, the largest central window."""
    for attempt in range(10):
        area, aspect, across, down = (uniform(*keys, Stream.FILE_CROP + 4 * attempt + k) for k in range(4))
        target = (0.08 + 0.92 * area) * width * height
        ratio = math.exp((2 * aspect - 1) * math.log(4 / 3))
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(across * (width - w + 1)), int(down * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def centre_crop(image: Image.Image, size: int, margin: float = _MARGIN) -> Image.Image:
    """Resize the shorter side of an image to size · margin and crop the central size × size pixels."""
    short = round(size * margin)
    width, height = (max(short, short * side // min(image.size)) for side in image.size)
    scaled = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return scaled.crop((left, top, left + size, top + size))


def to_rgb_image(file: Image.Image) -> Image.Image:
    """Convert to 8-bit RGB. 16-bit grey is divided by 256, because Pillow would clip it at 255."""
    if file.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(file) >> 8).astype(np.uint8)).convert("RGB")
    if file.mode in ("I", "F"):
        raise ValueError(f"images of mode {file.mode} have no known range")
    return file.convert("RGB")
