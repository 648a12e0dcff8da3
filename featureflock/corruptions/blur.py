"""Blur: defocus, glass, motion, zoom.

    defocus_blur   x * k,  k a disk on a grid of whole pixels, smoothed by a 3 × 3 Gaussian (σ = alias)
    glass_blur     G_σ x as bytes; then, for each pixel from the lower right to the upper left, x[h, w] becomes
                   x[h + i, w + j] with i, j uniform in {−δ, …, δ − 1}; then G_σ again
    motion_blur    Σ_t k_t x[p + t (cos φ, sin φ)],  k_t ∝ exp(−t² / 2σ²),  t = 0, …, 2 · radius,  φ ~ U(−45°, 45°)
    zoom_blur      (x + Σ_z Z_z x) / (number of zooms + 1),  Z_z the centre magnified z times, bilinear

The published code of glass blur intends to swap two pixels, but both are views of one array, so it copies. Motion blur
follows ImageMagick: a one-sided Gaussian along a line, its points rounded to whole pixels, edges repeated, the result
rounded. Zoom blur is linear, so one sparse matrix applies all zooms.
"""

import math
from functools import cache

import cv2
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy import ndimage, sparse

from featureflock.corruptions.images import Bytes, Floats, ImageRandom, relative_size, to_bytes

DEFOCUS = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))  # radius, alias
GLASS = ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))  # σ, δ, iterations
MOTION = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))  # radius, σ
ZOOM = (1.06, 1.11, 1.16, 1.21, 1.26)  # upper end of the zooms, which begin at 1 in steps of 0.01


def defocus_blur(x_bhwc: Bytes, severity: int, _: ImageRandom) -> Bytes:
    size = max(1.0, relative_size(x_bhwc))  # a disk smaller than a pixel has no effect
    radius, alias = (value * size for value in DEFOCUS[severity - 1])
    kernel = disk(radius, alias)
    reach = len(kernel) // 2
    height, width = x_bhwc.shape[1:3]
    padded = np.pad(x_bhwc / 255, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="reflect")
    blurred: Floats = np.zeros(x_bhwc.shape)
    for i, j in np.argwhere(kernel):
        blurred += float(kernel[i, j]) * padded[:, i : i + height, j : j + width]
    return to_bytes(blurred)


def glass_blur(x_bhwc: Bytes, severity: int, rng: ImageRandom) -> Bytes:
    size = relative_size(x_bhwc)
    sigma, delta, iterations = GLASS[severity - 1]
    sigma, delta = sigma * size, max(1, round(delta * size))
    height, width = x_bhwc.shape[1:3]
    x = (_smooth(x_bhwc / 255, sigma) * 255).astype(np.uint8)
    for iteration in range(iterations):
        offset = rng.below(2 * delta, height, width, 2, stream=iteration) - delta
        shuffle_pixels(x, offset[..., 0], offset[..., 1], delta)
    return to_bytes(_smooth(x / 255, sigma))


def motion_blur(x_bhwc: Bytes, severity: int, rng: ImageRandom) -> Bytes:
    radius, sigma = MOTION[severity - 1]
    size = relative_size(x_bhwc)
    return directional_blur(x_bhwc, radius * size, sigma * size, rng.uniform(-45, 45))


def zoom_blur(x_bhwc: Bytes, severity: int, _: ImageRandom) -> Bytes:
    batch, height, width, channels = x_bhwc.shape
    columns = x_bhwc.transpose(1, 2, 0, 3).reshape(height * width, batch * channels) / np.float32(255)
    blurred: NDArray[np.float32] = _zoom_matrix(ZOOM[severity - 1], height, width) @ columns
    return to_bytes(np.ascontiguousarray(blurred.reshape(height, width, batch, channels).transpose(2, 0, 1, 3)))


def disk(radius: float, alias: float) -> NDArray[np.float32]:
    """Kernel of a defocused lens, without surrounding zeros."""
    reach = 8 if radius <= 8 else math.ceil(radius)
    offset = np.arange(-reach, reach + 1)
    kernel = (offset[:, None] ** 2 + offset**2 <= radius**2).astype(np.float32)
    kernel /= kernel.sum()
    side = 3 if radius <= 8 else 5
    kernel = np.asarray(cv2.GaussianBlur(kernel, (side, side), sigmaX=alias), dtype=np.float32)
    used = int(np.abs(offset[kernel.any(axis=0)]).max())
    return kernel[reach - used : reach + used + 1, reach - used : reach + used + 1]


def shuffle_pixels(x_bhwc: Bytes, down_bhw: NDArray[np.int64], across_bhw: NDArray[np.int64], delta: int) -> None:
    """x[h, w] ← x[h + down, w + across] in place, pixel by pixel, for h and w from size − δ down to δ + 1."""
    (height, width), image = x_bhwc.shape[1:3], np.arange(len(x_bhwc))
    rows, columns = np.arange(height - delta, delta, -1), np.arange(width - delta, delta, -1)
    if delta == 1:  # offsets are −1 and 0, so every pixel is read before it is written: all at once
        h, w = rows[:, None], columns[None, :]
        x_bhwc[:, h, w] = x_bhwc[image[:, None, None], h + down_bhw[:, h, w], w + across_bhw[:, h, w]]
        return
    for h in rows:
        for w in columns:
            x_bhwc[:, h, w] = x_bhwc[image, h + down_bhw[:, h, w], w + across_bhw[:, h, w]]


def directional_blur(x_bhwc: Bytes, radius: float, sigma: float, degrees_b: Floats) -> Bytes:
    """ImageMagick's motion blur, with one angle for each image."""
    batch, height, width, _ = x_bhwc.shape
    taps = np.arange(2 * math.ceil(radius) + 1)
    weights = np.exp(-(taps**2) / (2 * sigma**2))
    weights /= weights.sum()
    # One by one, because NumPy's vectorised sine can depend on the position in the array.
    directions = np.array([(math.sin(math.radians(a)), math.cos(math.radians(a))) for a in degrees_b])
    offsets = np.ceil(directions[:, :, None] * taps - 0.5).astype(np.int64)
    down = np.clip(offsets[:, 0], 1 - height, height - 1)  # beyond, all pixels repeat the edge
    across = np.clip(offsets[:, 1], 1 - width, width - 1)
    top, left = max(0, -int(down.min())), max(0, -int(across.min()))
    border = (top, max(0, int(down.max()))), (left, max(0, int(across.max())))
    planes = np.ascontiguousarray(x_bhwc.transpose(0, 3, 1, 2), dtype=np.float32)
    windows = sliding_window_view(np.pad(planes, ((0, 0), (0, 0), *border), mode="edge"), (height, width), axis=(2, 3))
    windows = windows.transpose(0, 2, 3, 1, 4, 5)
    blurred, image = np.zeros_like(planes), np.arange(batch)
    for tap, weight in enumerate(weights.astype(np.float32)):
        blurred += weight * windows[image, top + down[:, tap], left + across[:, tap]]
    blurred += 0.5
    return np.ascontiguousarray(np.minimum(blurred, 255).astype(np.uint8).transpose(0, 2, 3, 1))


@cache
def magnification(zoom: float, height: int, width: int) -> sparse.csr_array:
    """Matrix that magnifies the centre of an image, (H·W, H·W)."""
    factors = []
    for size in (height, width):
        crop = math.ceil(size / zoom)
        top = (size - crop) // 2
        matrix: Floats = ndimage.zoom(np.eye(size)[top : top + crop], (zoom, 1), order=1)
        trim = (len(matrix) - size) // 2
        factors.append(sparse.csr_array(matrix[trim : trim + size]))
    return sparse.csr_array(sparse.kron(*factors))


@cache
def _zoom_matrix(end: float, height: int, width: int) -> sparse.csr_array:
    """Average of all magnifications and the identity, (H·W, H·W)."""
    zooms = np.arange(1, end, 0.01).tolist()
    identity = sparse.eye_array(height * width, format="csr")
    total = sum((magnification(zoom, height, width) for zoom in zooms), start=identity)
    return sparse.csr_array(total / (len(zooms) + 1), dtype=np.float32)


def _smooth(x_bhwc: Floats, sigma: float) -> Floats:
    smoothed: Floats = ndimage.gaussian_filter(x_bhwc, sigma, mode="nearest", truncate=4.0, axes=(1, 2))
    return smoothed
