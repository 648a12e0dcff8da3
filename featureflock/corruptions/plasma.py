"""Batched plasma fractals by the diamond-square algorithm on a torus of n × n points, n a power of two.

    step = n, n/2, …, 2:   the centre of each square of side `step`, then the middle of each of its edges, becomes the
                           mean of its four neighbours at distance step/2 plus w · U(−w, w);   then w ← w / decay

with w = 100 initially, so the noise shrinks by decay² per level. Finally the map is rescaled to [0, 1].
"""

import numpy as np

from featureflock.corruptions.images import Floats, ImageRandom


def plasma(rng: ImageRandom, size: int, decay: float) -> Floats:
    """Return maps (B, n, n) in [0, 1], where n is the smallest power of two that is at least `size`."""
    n = 1 << (size - 1).bit_length()
    map_bnn: Floats = np.zeros((len(rng.index_b), n, n))
    step, wibble, level = n, 100.0, 0
    while step >= 2:
        half, k = step // 2, n // step
        noise = wibble * rng.uniform(-wibble, wibble, 3, k, k, stream=level)
        corner = map_bnn[:, ::step, ::step]
        pair = corner + np.roll(corner, -1, axis=1)
        centre = (pair + np.roll(pair, -1, axis=2)) / 4 + noise[:, 0]
        map_bnn[:, half::step, half::step] = centre
        across = centre + np.roll(centre, 1, axis=1) + corner + np.roll(corner, -1, axis=2)
        map_bnn[:, ::step, half::step] = across / 4 + noise[:, 1]
        down = centre + np.roll(centre, 1, axis=2) + corner + np.roll(corner, -1, axis=1)
        map_bnn[:, half::step, ::step] = down / 4 + noise[:, 2]
        step, wibble, level = half, wibble / decay, level + 1
    map_bnn -= map_bnn.min(axis=(1, 2), keepdims=True)
    map_bnn /= map_bnn.max(axis=(1, 2), keepdims=True)
    return map_bnn
