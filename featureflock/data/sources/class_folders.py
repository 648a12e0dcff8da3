"""Published data sets as PNG files in class folders: train/<class>/*.png and test/<class>/*.png."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from featureflock.data.sources.archives import Arrays


def read_class_folders(folder: Path, class_names: Sequence[str], shape: tuple[int, int, int]) -> Arrays | None:
    """Return the images class by class, files sorted by name; None if there are no such folders.

    Args:
        folder: contains train/ and test/.
        class_names: in the order of their labels; folders may have underscores instead of spaces.
        shape: (H, W, C).
    """
    if not all((folder / split).is_dir() for split in ("train", "test")):
        return None
    arrays: Arrays = {}
    for split in ("train", "test"):
        images, labels = [], []
        for label, name in enumerate(class_names):
            paths = sorted((folder / split / name.replace(" ", "_")).glob("*.png"))
            if not paths:
                raise ValueError(f"{folder / split} has no PNG files in a folder {name.replace(' ', '_')}.")
            images += [_read_png(path, shape) for path in paths]
            labels += [label] * len(paths)
        arrays[f"{split}_x"] = np.stack(images)
        arrays[f"{split}_y"] = np.array(labels, dtype=np.uint8)
    return arrays


def _read_png(path: Path, shape: tuple[int, int, int]) -> np.ndarray:
    try:
        with Image.open(path, formats=["PNG"]) as file:
            image = np.asarray(file.convert("RGB" if shape[2] == 3 else "L")).reshape(*file.size[::-1], shape[2])
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is truncated or damaged: it is not a complete PNG.") from error
    if image.shape != shape:
        raise ValueError(
            f"{path} has {image.shape[1]} × {image.shape[0]} pixels; {shape[1]} × {shape[0]} were expected."
        )
    return image
