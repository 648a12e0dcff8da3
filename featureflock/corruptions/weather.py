"""Weather: snow, frost, fog, brightness.

snow         s ~ N(c₀, c₁) for each pixel, magnified c₂ times, 0 where below c₃, blurred by motion (radius c₄, σ c₅,
             angle U(−135°, −45°));  y = c₆ x + (1 − c₆) max(x, 1.5 grey(x) + 0.5);  y + s + s rotated by 180°
frost        c₀ x + c₁ f,  f a random window of an image of frost
fog          (x + c₀ p) · m / (m + c₀),  p a plasma fractal of decay c₁, m the largest value of x
brightness   V ← min(V + c, 1) in HSV, where V = max(R, G, B).  This multiplies R, G and B by V′/V, which preserves
             hue and saturation; black, which has neither, becomes grey.
"""

import numpy as np

from featureflock.corruptions.blur import directional_blur, magnification
from featureflock.corruptions.frost import frost_views
from featureflock.corruptions.images import Bytes, ImageRandom, plasma, relative_size, to_bytes

SNOW = (  # mean, std, zoom, threshold, radius, σ, weight of the image
    (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
    (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
    (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
    (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
    (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
)
FROST = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))  # weights of image and frost
FOG = ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))  # thickness, decay
BRIGHTNESS = (0.05, 0.1, 0.15, 0.2, 0.3)

_GREY = np.array([0.299, 0.587, 0.114], dtype=np.float32)


def snow(x_bhwc: Bytes, severity: int, rng: ImageRandom) -> Bytes:
    mean, std, zoom, threshold, radius, sigma, weight = SNOW[severity - 1]
    height, width = x_bhwc.shape[1:3]
    size = relative_size(x_bhwc)
    layer = rng.normal(mean, std, height, width)
    if zoom * size > 1:
        flat = np.ascontiguousarray(layer.reshape(-1, height * width).T)
        layer = np.ascontiguousarray((magnification(zoom * size, height, width) @ flat).T).reshape(layer.shape)
    layer[layer < threshold] = 0
    angle = rng.uniform(-135, -45, stream=1)
    layer = directional_blur(to_bytes(layer)[..., None], radius * size, sigma * size, angle) / np.float32(255)
    x = x_bhwc / np.float32(255)
    grey = (x[..., 0] * _GREY[0] + x[..., 1] * _GREY[1] + x[..., 2] * _GREY[2])[..., None]
    whitened = np.maximum(x, grey * np.float32(1.5) + np.float32(0.5))
    x = np.float32(weight) * x + np.float32(1 - weight) * whitened
    return to_bytes(x + layer + layer[:, ::-1, ::-1])


def frost(x_bhwc: Bytes, severity: int, rng: ImageRandom) -> Bytes:
    image_weight, frost_weight = FROST[severity - 1]
    height, width = x_bhwc.shape[1:3]
    views = frost_views(relative_size(x_bhwc), height, width)
    place = rng.uniform(0, 1, 3)
    frosted = image_weight * x_bhwc.astype(np.float64)
    for image, (choice, down, across) in enumerate(place):
        view = views[int(choice * len(views))]
        top, left = int(down * (view.shape[0] - height)), int(across * (view.shape[1] - width))
        frosted[image] += frost_weight * view[top : top + height, left : left + width]
    return np.clip(frosted, 0, 255, out=frosted).astype(np.uint8)


def fog(x_bhwc: Bytes, severity: int, rng: ImageRandom) -> Bytes:
    thickness, decay = FOG[severity - 1]
    height, width = x_bhwc.shape[1:3]
    x = x_bhwc / 255
    largest = x.max(axis=(1, 2, 3), keepdims=True)
    x += thickness * plasma(rng, max(height, width), decay)[:, :height, :width, None]
    return to_bytes(x * largest / (largest + thickness))


def brightness(x_bhwc: Bytes, severity: int, _: ImageRandom) -> Bytes:
    x = x_bhwc / 255
    value = x.max(axis=3, keepdims=True)
    brighter = np.minimum(value + BRIGHTNESS[severity - 1], 1)
    black = value == 0
    x /= np.where(black, 1, value)  # dividing first makes the largest channel exactly 1
    x += black
    x *= brighter
    return to_bytes(x)
