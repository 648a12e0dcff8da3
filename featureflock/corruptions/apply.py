"""The 15 corruptions by name, for batches of pictures.

What picture `index` becomes is a function of (seed, corruption, severity, index) and its pixels alone: the same bytes
whatever else is in the batch, and whichever process it is in.
"""

import operator
from typing import Any, Literal, get_args

import numpy as np

from featureflock.corruptions import blur, digital, noise, weather
from featureflock.corruptions.images import Bytes, Corruption, ImageRandom
from featureflock.utils.suggestions import unknown_name

Name = Literal[
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
]
CORRUPTIONS: tuple[Name, ...] = get_args(Name)
"""In the published order."""
SEVERITIES = (1, 2, 3, 4, 5)

_FUNCTIONS: tuple[Corruption, ...] = (
    noise.gaussian_noise,
    noise.shot_noise,
    noise.impulse_noise,
    blur.defocus_blur,
    blur.glass_blur,
    blur.motion_blur,
    blur.zoom_blur,
    weather.snow,
    weather.frost,
    weather.fog,
    weather.brightness,
    digital.contrast,
    digital.elastic_transform,
    digital.pixelate,
    digital.jpeg_compression,
)
_AT_ONCE = 64
"""Pictures of 32 × 32 whose numbers fit into a processor's cache."""
_SMALLEST = 24
"""Below that, scaled blur is less than a pixel: no corruption at all."""


def corrupt(images: Bytes, corruption: str, severity: int, *, seed: int, indices: Any) -> Bytes:
    """Corrupted copies of pictures.

    Args:
        images: uint8 (B, H, W, 3), as in the published files. The constants are those of CIFAR's 32 × 32; for other
            small pictures lengths in pixels are scaled by min(H, W) / 32.
        corruption: one of CORRUPTIONS.
        severity: 1 to 5.
        seed: of the random numbers; 0 to 2³² − 1.
        indices: of the pictures in their set, (B,): each has random numbers of its own.
    """
    number = CORRUPTIONS.index(known(corruption))
    severity, seed = _whole("severity", severity), _whole("seed", seed)
    index_b = _checked(images, severity, seed, np.asarray(indices))
    corrupted = np.empty(images.shape, dtype=np.uint8)
    at_once = max(1, _AT_ONCE * 1024 // (images.shape[1] * images.shape[2]))
    for start in range(0, len(images), at_once):
        part = slice(start, start + at_once)
        chance = ImageRandom(index_b[part], (seed, number, severity))
        corrupted[part] = _FUNCTIONS[number](np.ascontiguousarray(images[part]), severity, chance)
    return corrupted


def known(name: str) -> Name:
    """The name itself, or a sentence that suggests one."""
    for corruption in CORRUPTIONS:
        if name == corruption:
            return corruption
    raise unknown_name("corruption", name, CORRUPTIONS)


def _whole(what: str, number: Any) -> int:
    """As an int of Python, whose sums do not overflow and whose kind does not matter."""
    try:
        return operator.index(number)
    except TypeError:
        raise ValueError(f"{what} must be an integer; got {number!r}.") from None


def _checked(images: Bytes, severity: int, seed: int, indices: Any) -> Any:
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        what = f"{images.dtype} of shape {tuple(images.shape)}" if hasattr(images, "shape") else type(images).__name__
        raise ValueError(f"Pictures must be a NumPy array of uint8 (B, H, W, 3); got {what}.")
    if min(images.shape[1:3]) < _SMALLEST:
        raise ValueError(f"Pictures must have at least {_SMALLEST} pixels a side; got {images.shape[1:3]}.")
    if severity not in SEVERITIES:
        raise ValueError(f"severity must be 1, 2, 3, 4 or 5; got {severity!r}.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be from 0 to 2³² − 1; got {seed}.")
    if indices.shape != (len(images),) or (indices.size and indices.dtype.kind not in "iu"):
        raise ValueError(
            f"indices must be {len(images)} integers, one a picture; got {indices.dtype} of shape {indices.shape}."
        )
    if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= 2**32):
        raise ValueError("indices must be from 0 to 2³² − 1.")
    return indices.astype(np.int64)
