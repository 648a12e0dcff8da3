"""Reference implementations of the corruptions: as published, one image at a time, slow.

Images are uint8 (H, W, 3), H = W = 32. Random corruptions take their random numbers as arguments.
"""

import colorsys
import io
import math

import cv2
import numpy as np
from PIL import Image
from scipy import ndimage


def truncated(x):
    return np.uint8(np.clip(x, 0, 1) * 255)


def defocus_blur(x, severity):
    radius, alias = [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)][severity - 1]
    line = np.arange(-8, 9)
    across, down = np.meshgrid(line, line)
    kernel = (across**2 + down**2 <= radius**2).astype(np.float32)
    kernel = cv2.GaussianBlur(kernel / kernel.sum(), (3, 3), sigmaX=alias)
    return truncated(np.stack([cv2.filter2D(x[..., c] / 255, -1, kernel) for c in range(3)], axis=-1))


def clipped_zoom(x, zoom):
    size = len(x)
    crop = math.ceil(size / zoom)
    top = (size - crop) // 2
    larger = ndimage.zoom(x[top : top + crop, top : top + crop], (zoom, zoom, 1), order=1)
    trim = (len(larger) - size) // 2
    return larger[trim : trim + size, trim : trim + size]


def zoom_blur(x, severity):
    zooms = np.arange(1, [1.06, 1.11, 1.16, 1.21, 1.26][severity - 1], 0.01)
    x = x / 255
    return truncated((x + sum(clipped_zoom(x, zoom) for zoom in zooms)) / (len(zooms) + 1))


def brightness(x, severity):
    c = [0.05, 0.1, 0.15, 0.2, 0.3][severity - 1]
    out = np.empty(x.shape)
    for h in range(len(x)):
        for w in range(len(x)):
            hue, saturation, value = colorsys.rgb_to_hsv(*x[h, w] / 255)
            out[h, w] = colorsys.hsv_to_rgb(hue, saturation, min(value + c, 1))
    return truncated(out)


def contrast(x, severity):
    c = [0.75, 0.5, 0.4, 0.3, 0.15][severity - 1]
    x = x / 255
    mean = x.mean(axis=(0, 1))
    return truncated((x - mean) * c + mean)


def pixelate(x, severity):
    small = int(32 * [0.95, 0.9, 0.85, 0.75, 0.65][severity - 1])
    image = Image.fromarray(x).resize((small, small), Image.Resampling.BOX)
    return np.array(image.resize((32, 32), Image.Resampling.BOX))


def jpeg_compression(x, severity):
    stream = io.BytesIO()
    Image.fromarray(x).save(stream, "JPEG", quality=[80, 65, 58, 50, 40][severity - 1])
    return np.array(Image.open(stream))


def glass_shuffle(x, offsets, delta):
    """The published swap, in the published order; `offsets` (H, W, 2) are (down, across)."""
    for h in range(len(x) - delta, delta, -1):
        for w in range(len(x) - delta, delta, -1):
            down, across = offsets[h, w]
            x[h, w], x[h + down, w + across] = x[h + down, w + across], x[h, w]


def smooth(x, sigma):
    return np.stack([ndimage.gaussian_filter(x[..., c], sigma, mode="nearest", truncate=4) for c in range(3)], -1)


def magick_motion_blur(x, radius, sigma, degrees):
    """ImageMagick's MotionBlurImage: pixel by pixel, edges repeated, the result rounded."""
    width = 2 * math.ceil(radius) + 1
    kernel = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(width)]
    kernel = [k / sum(kernel) for k in kernel]
    vertical, horizontal = width * math.sin(math.radians(degrees)), width * math.cos(math.radians(degrees))
    length = math.hypot(vertical, horizontal)
    out = np.zeros(x.shape)
    for h in range(len(x)):
        for w in range(len(x)):
            for i, k in enumerate(kernel):
                row, column = h + math.ceil(i * vertical / length - 0.5), w + math.ceil(i * horizontal / length - 0.5)
                out[h, w] += k * x[min(max(row, 0), len(x) - 1), min(max(column, 0), len(x) - 1)]
    return np.uint8(np.floor(out + 0.5))


def snow(x, severity, normal, degrees):
    mean, std, zoom, threshold, radius, sigma, weight = [
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ][severity - 1]
    layer = clipped_zoom((mean + std * normal)[..., None], zoom)
    layer[layer < threshold] = 0
    layer = magick_motion_blur(truncated(layer), radius, sigma, degrees) / 255
    x = (x / 255).astype(np.float32)
    grey = cv2.cvtColor(x, cv2.COLOR_RGB2GRAY)[..., None]
    x = weight * x + (1 - weight) * np.maximum(x, 1.5 * grey + 0.5)
    return truncated(x + layer + np.rot90(layer, 2))


def plasma(noise_of, decay, size=32):
    """Point by point; `noise_of(level, kind, row, column)` is in [−1, 1]; kind is 0 for centres, 1 and 2 for edges."""
    heights = np.zeros((size, size))
    step, wibble, level = size, 100.0, 0
    while step >= 2:
        half = step // 2

        def fill(kind, rows, columns, neighbours, half=half, step=step, wibble=wibble, level=level):
            for row in rows:
                for column in columns:
                    around = [heights[(row + half * a) % size, (column + half * b) % size] for a, b in neighbours]
                    noise = wibble * wibble * noise_of(level, kind, row // step, column // step)
                    heights[row, column] = sum(around) / 4 + noise

        corners, middles = range(0, size, step), range(half, size, step)
        beside = [(-1, 0), (1, 0), (0, -1), (0, 1)]
        fill(0, middles, middles, [(-1, -1), (-1, 1), (1, -1), (1, 1)])
        fill(1, corners, middles, beside)
        fill(2, middles, corners, beside)
        step, wibble, level = half, wibble / decay, level + 1
    heights -= heights.min()
    return heights / heights.max()


def fog(x, severity, noise_of):
    thickness, decay = [(0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)][severity - 1]
    x = x / 255
    largest = x.max()
    return truncated((x + thickness * plasma(noise_of, decay)[..., None]) * largest / (largest + thickness))


def affine_map(x, moves):
    """OpenCV's warpAffine before version 5, pixel by pixel: positions are rounded to 1/32, edges mirrored."""
    points = np.float32([[26, 26], [26, 6], [6, 6]])
    (a, b, e), (c, d, f) = cv2.invertAffineTransform(cv2.getAffineTransform(points, points + moves)).tolist()
    padded = np.pad(x.astype(float), ((20, 20), (20, 20), (0, 0)), mode="reflect")
    out = np.empty_like(x)
    for h in range(32):
        for w in range(32):
            column = (round(a * w * 1024) + round((b * h + e) * 1024) + 16) // 32
            row = (round(c * w * 1024) + round((d * h + f) * 1024) + 16) // 32
            r, s = (row % 32) / 32, (column % 32) / 32
            four = padded[row // 32 + 20 : row // 32 + 22, column // 32 + 20 : column // 32 + 22]
            out[h, w] = np.einsum("i,j,ijc->c", [1 - r, r], [1 - s, s], four)
    return out


def elastic_transform(x, severity, moves, fields):
    """`moves` (3, 2) and `fields` (2, 32, 32) are in [−1, 1]."""
    alpha, sigma, affine = [
        (0, 0, 32 * 0.08),
        (32 * 0.05, 32 * 0.2, 32 * 0.07),
        (32 * 0.08, 32 * 0.06, 32 * 0.06),
        (32 * 0.1, 32 * 0.04, 32 * 0.05),
        (32 * 0.1, 32 * 0.03, 32 * 0.03),
    ][severity - 1]
    x = (x / 255).astype(np.float32)
    x = affine_map(x, (affine * moves).astype(np.float32))
    across, down = (alpha * ndimage.gaussian_filter(f, sigma, mode="reflect", truncate=3) for f in fields)
    rows, columns = np.meshgrid(np.arange(32), np.arange(32), indexing="ij")
    positions = [rows + down, columns + across]
    return truncated(
        np.stack([ndimage.map_coordinates(x[..., c], positions, order=1, mode="reflect") for c in range(3)], -1)
    )
