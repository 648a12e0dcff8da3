"""Pictures in a folder for each class: ImageNet, and any tree like it.

    FOLDER/train/<class>/*.JPEG    FOLDER/val/<class>/*.JPEG

Training takes a random resized crop (Szegedy et al., 2015): a window with an area of 8 to 100 % of the picture and an
aspect ratio of 3/4 to 4/3, log-uniform, scaled to `size`, and in half of the cases its mirror image. Evaluation scales
the shorter side to `size` · 256/224 and takes the centre.
"""

import hashlib
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from featureflock.data.augment import EpochKey
from featureflock.data.examples import unit_scale
from featureflock.data.rng import uniform
from featureflock.data.streaming import ExampleReader, StreamedExamples

IMAGENET_SCALE = unit_scale((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and deviation of ImageNet's pixels."""

_PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff", ".gif")
_TRAIN, _TEST = ("train", "training"), ("val", "valid", "validation", "test")

_MARGIN = 256 / 224

Box = tuple[float, float, float, float]


def read_tree(folder: Path, *, size: int, workers: int) -> tuple[StreamedExamples, StreamedExamples, list[str]]:
    """Training and test pictures of a tree, and the names of the classes."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}; give one that holds train/<class>/ and val/<class>/.")
    parts = []
    for names in (_TRAIN, _TEST):
        part = next((folder / name for name in names if (folder / name).is_dir()), None)
        if part is None:
            raise FileNotFoundError(f"{folder} holds none of the folders {', '.join(names)}; make one of them.")
        parts.append(part)
    train_classes, test_classes = (class_names(part) for part in parts)
    unknown_name = sorted(set(test_classes) - set(train_classes))
    if unknown_name:
        raise ValueError(f"{parts[1]} has the class {unknown_name[0]}, which is not in {parts[0]}.")
    train, test = (read_classes(part, train_classes, size=size, workers=workers) for part in parts)
    missing = [name for k, name in enumerate(train_classes) if k not in set(train.labels.tolist())]
    if missing:
        raise ValueError(f"{parts[0] / missing[0]} holds no pictures; add some or remove the folder.")
    return train, test, train_classes


def class_names(part: Path) -> list[str]:
    """The folders in a folder, in order: their places are the labels."""
    return sorted(e.name for e in os.scandir(part) if e.is_dir() and e.name[0] != ".")


def read_classes(
    part: Path, classes: Sequence[str], *, size: int, workers: int, margin: float = _MARGIN
) -> StreamedExamples:
    """The pictures in the folders of these classes; a class without a folder has none."""
    paths, labels = [], []
    for label, name in enumerate(classes):
        files = [os.path.join(folder, file) for folder, _, names in os.walk(part / name) for file in names]
        pictures = sorted(os.path.relpath(file, part) for file in files if file.lower().endswith(_PICTURES))
        paths += pictures
        labels += [label] * len(pictures)
    if not paths:
        raise FileNotFoundError(f"{part} holds no pictures; they belong in {part / '<class>'}.")
    reader = ImageFiles(str(part), tuple(paths), size, margin)
    return StreamedExamples(reader, torch.tensor(labels), scale=IMAGENET_SCALE, workers=workers)


@dataclass(frozen=True)
class ImageFiles(ExampleReader):
    """Decodes picture files into bytes (3, size, size)."""

    folder: str
    paths: tuple[str, ...]
    """Relative to the folder."""
    size: int
    margin: float = _MARGIN
    """In evaluation the shorter side is scaled to size · margin; 1 for pictures that have been cropped before."""

    def read(self, index: int, draw: EpochKey | None) -> Tensor:
        path = self.name(index)
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
            raise ValueError("it is no ordinary file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata is no reason to speak: the pixels count
            with Image.open(path) as file:
                picture = to_rgb_image(file)
        if draw is None:
            return _pixels(centre(picture, self.size, self.margin))
        keys = draw.seed, draw.epoch, index
        box = random_resized_crop(*picture.size, *keys)
        pixels = _pixels(picture.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box))
        return pixels.flip(-1) if uniform(*keys, 0) < 0.5 else pixels

    def name(self, index: int) -> str:
        return os.path.join(self.folder, self.paths[index])

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.paths).encode()).hexdigest()

    def identity(self) -> str:
        """By the size and the time of each file."""
        sha = hashlib.sha256(f"{self.size} {self.margin}".encode())
        for path in self.paths:
            try:
                stat = os.stat(os.path.join(self.folder, path))
                sha.update(f"{path} {stat.st_size} {stat.st_mtime_ns}\n".encode())
            except OSError:  # a link to nowhere: it cannot be read, but it may be mended
                sha.update(f"{path}\n".encode())
        return sha.hexdigest()


def random_resized_crop(width: int, height: int, *keys: int) -> Box:
    """The window of a random resized crop; the largest central one that fits if ten tries do not."""
    for attempt in range(10):
        area, aspect, across, down = (uniform(*keys, 1 + 4 * attempt + k) for k in range(4))
        target = (0.08 + 0.92 * area) * width * height
        ratio = math.exp((2 * aspect - 1) * math.log(4 / 3))
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(across * (width - w + 1)), int(down * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def centre(picture: Image.Image, size: int, margin: float = _MARGIN) -> Image.Image:
    """The picture scaled so that its shorter side is size · margin, and of that the centre, size × size."""
    short = round(size * margin)
    width, height = (max(short, short * side // min(picture.size)) for side in picture.size)
    scaled = picture.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return scaled.crop((left, top, left + size, top + size))


def to_rgb_image(file: Image.Image) -> Image.Image:
    """In RGB with 8 bits; of 16 bits of grey Pillow would keep the lower end and clip the rest."""
    if file.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(file) >> 8).astype(np.uint8)).convert("RGB")
    if file.mode in ("I", "F"):
        raise ValueError(f"pictures of mode {file.mode} have no known range")
    return file.convert("RGB")


def _pixels(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)
