"""Digital: contrast, elastic transform, pixelation, JPEG compression.

contrast            (x − μ) c + μ,  μ the mean of each channel
elastic_transform   an affine map that moves three points by U(−a, a) each, bilinear at 1/32 of a pixel, mirrored at
                    the edges (without the edge pixel); then x[p + α G_σ u(p)], u ~ U(−1, 1) for each pixel and
                    direction, G_σ truncated at 3σ, bilinear, mirrored at the edges (with the edge pixel)
pixelate            reduced to ⌊c · size⌋ with a box filter, and enlarged with it
jpeg_compression    encoded and decoded as JPEG of quality c

The affine map is that of OpenCV before version 5, which made the published files: positions are rounded to 1/32 of a
pixel. Newer versions do not round, which would change bytes by up to 4.
"""

import io
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from featureflock.corruptions.images import Bytes, Floats, ImageRandom, to_bytes

CONTRAST = (0.75, 0.5, 0.4, 0.3, 0.15)
ELASTIC = ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))
"""α, σ, a, relative to the size of the image."""
PIXELATE = (0.95, 0.9, 0.85, 0.75, 0.65)
JPEG = (80, 65, 58, 50, 40)

Floats32 = NDArray[np.float32]

_TERM_UNITS, _POSITION_UNITS = 1024, 32  # the two terms of a position are rounded to 1/1024 pixel, their sum to 1/32


def contrast(x_bhwc: Bytes, severity: int, _: ImageRandom) -> Bytes:
    pixels = x_bhwc.shape[1] * x_bhwc.shape[2]
    mean = x_bhwc.sum(axis=(1, 2), keepdims=True, dtype=np.int64) / (255 * pixels)
    return to_bytes((x_bhwc / 255 - mean) * CONTRAST[severity - 1] + mean)


def elastic_transform(x_bhwc: Bytes, severity: int, rng: ImageRandom) -> Bytes:
    height, width = x_bhwc.shape[1:3]
    alpha, sigma, moved = (value * min(height, width) for value in ELASTIC[severity - 1])
    x: Floats32 = x_bhwc.astype(np.float32) / np.float32(255)
    x = affine(x, rng.uniform(-moved, moved, 3, 2).astype(np.float32))
    if alpha:
        u = rng.uniform(-1, 1, 2, height, width, stream=1)
        u = alpha * ndimage.gaussian_filter(u, sigma, mode="reflect", truncate=3.0, axes=(2, 3))
        across, down = u[:, 0].astype(np.float32), u[:, 1].astype(np.float32)
        x = _interpolate(x, np.arange(height)[:, None] + down, np.arange(width) + across, edge=1)
    return to_bytes(x)


def pixelate(x_bhwc: Bytes, severity: int, _: ImageRandom) -> Bytes:
    height, width = x_bhwc.shape[1:3]
    c = PIXELATE[severity - 1]
    return _box_resize(_box_resize(x_bhwc, int(height * c), int(width * c)), height, width)


def jpeg_compression(x_bhwc: Bytes, severity: int, _: ImageRandom) -> Bytes:
    y_bhwc = np.empty_like(x_bhwc)
    for x, y in zip(x_bhwc, y_bhwc, strict=True):
        stream = io.BytesIO()
        Image.fromarray(x).save(stream, "JPEG", quality=JPEG[severity - 1])
        with Image.open(stream, formats=["JPEG"]) as image:
            y[:] = np.asarray(image)
    return y_bhwc


def affine(x_bhwc: Floats32, move_bpd: Floats32) -> Floats32:
    """Apply to each image the affine map that moves three corners of a square in its middle."""
    height, width = x_bhwc.shape[1:3]
    centre, side = np.array([width // 2, height // 2], dtype=np.float32), min(height, width) // 3
    corners = centre + side * np.array([[1, 1], [1, -1], [-1, -1]], dtype=np.float32)
    lower, upper, left = (corners + move_bpd).astype(np.float64).transpose(1, 2, 0)[..., None]  # (d, B, 1) each
    right, down = (upper - left) / (2 * side), (lower - upper) / (2 * side)  # the images of unit steps
    start = upper - corners[1, 0] * right - corners[1, 1] * down
    determinant = right[0] * down[1] - right[1] * down[0]
    row, column = np.arange(height, dtype=np.float64), np.arange(width, dtype=np.float64)

    def source(by_column: Floats, by_row: Floats) -> Floats:
        """Source coordinate of each pixel under the inverse map, (B, H, W)."""
        first = -(by_column * start[0] + by_row * start[1])
        terms = np.rint(_TERM_UNITS * (by_row * row + first)), np.rint(_TERM_UNITS * by_column * column)
        units = terms[0][:, :, None] + terms[1][:, None, :]
        positions: Floats = np.floor(units * _POSITION_UNITS / _TERM_UNITS + 0.5) / _POSITION_UNITS
        return positions

    rows = source(-right[1] / determinant, right[0] / determinant)
    columns = source(down[1] / determinant, -down[0] / determinant)
    return _interpolate(x_bhwc, rows, columns, edge=0)


def _interpolate(x_bhwc: Floats32, row_bhw: Floats, column_bhw: Floats, *, edge: Literal[0, 1]) -> Floats32:
    """x[row, column] by bilinear interpolation, mirrored at the edges: … 1 0 | 0 1 … (edge=1) or … 2 1 | 0 1 … (0)."""
    batch, height, width, channels = x_bhwc.shape
    above, before = np.floor(row_bhw), np.floor(column_bhw)
    lower, right = (row_bhw - above)[..., None].astype(np.float32), (column_bhw - before)[..., None].astype(np.float32)
    rows = [_mirrored(above.astype(np.int64) + k, height, edge) * width for k in (0, 1)]
    columns = [_mirrored(before.astype(np.int64) + k, width, edge) for k in (0, 1)]
    pixels = x_bhwc.reshape(-1, channels)
    first = (np.arange(batch) * (height * width))[:, None, None]
    ((a, b), (c, d)) = ([np.take(pixels, first + i + j, axis=0) for j in columns] for i in rows)
    top, bottom = a + right * (b - a), c + right * (d - c)
    return np.asarray(top + lower * (bottom - top), dtype=np.float32)


def _mirrored(index: NDArray[np.int64], size: int, edge: int) -> NDArray[np.int64]:
    index = index % (2 * (size - 1 + edge))
    return np.minimum(index, 2 * (size - 1) + edge - index)


def _box_resize(x_bhwc: Bytes, height: int, width: int) -> Bytes:
    """Pillow's box filter on all images at once: stacked vertically for rows, then side by side for columns."""
    batch, old_height, old_width, channels = x_bhwc.shape
    tall = Image.fromarray(np.ascontiguousarray(x_bhwc).reshape(batch * old_height, old_width, channels))
    narrow = np.asarray(tall.resize((width, batch * old_height), Image.Resampling.BOX))
    beside = narrow.reshape(batch, old_height, width, channels).transpose(1, 0, 2, 3)
    wide = Image.fromarray(np.ascontiguousarray(beside).reshape(old_height, batch * width, channels))
    low = np.asarray(wide.resize((batch * width, height), Image.Resampling.BOX))
    return np.ascontiguousarray(low.reshape(height, batch, width, channels).transpose(1, 0, 2, 3))
