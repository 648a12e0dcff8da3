"""Apply the 15 corruptions to batches of images.

    corrupt(images, "fog", 3, seed=0, indices=range(len(images)))

The result for image `index` is a function of its pixels and of (seed, corruption, severity, index) alone: the same
bytes in any batch and any process.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featureflock.corruptions import blur, digital, noise, weather
from featureflock.corruptions.images import Bytes, Corruption, ImageRandom
from featureflock.utils.registry import unknown_name

_FUNCTIONS: dict[str, Corruption] = {
    function.__name__: function
    for function in (
        *(noise.gaussian_noise, noise.shot_noise, noise.impulse_noise),
        *(blur.defocus_blur, blur.glass_blur, blur.motion_blur, blur.zoom_blur),
        *(weather.snow, weather.frost, weather.fog, weather.brightness),
        *(digital.contrast, digital.elastic_transform, digital.pixelate, digital.jpeg_compression),
    )
}
CORRUPTIONS = tuple(_FUNCTIONS)
"""Names in the published order."""
SEVERITIES = (1, 2, 3, 4, 5)

_BATCH = 64  # 32 × 32 images, whose intermediate results fit into a processor's cache
_MIN_SIZE = 24  # for smaller images, the scaled blur is less than a pixel and has no effect


def corrupt(images: Bytes, corruption: str, severity: int, *, seed: int, indices: Any) -> Bytes:
    """Return corrupted copies of images.

    Args:
        images: uint8 (B, H, W, 3), as in the published files. The constants are those of CIFAR's 32 × 32; for other
            sizes, lengths in pixels are multiplied by min(H, W) / 32.
        corruption: one of CORRUPTIONS.
        severity: 1 to 5.
        seed: random seed, 0 to 2³² − 1.
        indices: positions of the images in their data set, (B,): the keys of their random numbers.
    """
    number = CORRUPTIONS.index(check_corruption(corruption))
    index_b = _check(images, severity, seed, np.asarray(indices))
    corrupted = np.empty(images.shape, dtype=np.uint8)
    batch = max(1, _BATCH * 1024 // (images.shape[1] * images.shape[2]))
    for start in range(0, len(images), batch):
        part = slice(start, start + batch)
        rng = ImageRandom(index_b[part], (int(seed), number, int(severity)))
        corrupted[part] = _FUNCTIONS[corruption](np.ascontiguousarray(images[part]), severity, rng)
    return corrupted


def check_corruption(name: str) -> str:
    """Return the name of a corruption, or raise ValueError with a suggestion."""
    if name not in _FUNCTIONS:
        raise unknown_name("corruption", name, CORRUPTIONS)
    return name


def _check(images: Bytes, severity: int, seed: int, indices: NDArray[Any]) -> NDArray[np.int64]:
    """Return the indices as int64 if all arguments are valid."""
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        got = f"{images.dtype} of shape {tuple(images.shape)}" if hasattr(images, "shape") else type(images).__name__
        raise ValueError(f"Images must be a NumPy array of uint8 (B, H, W, 3); got {got}.")
    if min(images.shape[1:3]) < _MIN_SIZE:
        raise ValueError(f"Images must have at least {_MIN_SIZE} pixels on each side; got {images.shape[1:3]}.")
    for name, value in (("severity", severity), ("seed", seed)):
        if not isinstance(value, int | np.integer):
            raise ValueError(f"{name} must be an integer; got {value!r}.")
    if severity not in SEVERITIES:
        raise ValueError(f"severity must be 1, 2, 3, 4 or 5; got {severity!r}.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be from 0 to 2³² − 1; got {seed}.")
    if indices.shape != (len(images),) or (indices.size and indices.dtype.kind not in "iu"):
        raise ValueError(f"indices must be {len(images)} integers; got {indices.dtype} of shape {indices.shape}.")
    if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= 2**32):
        raise ValueError("indices must be from 0 to 2³² − 1.")
    return indices.astype(np.int64)
