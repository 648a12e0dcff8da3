"""Plasma fractals by the diamond-square algorithm, many at once, on a torus of n × n points, n a power of two.

    step = n, n/2, …, 2:   the centre of each square of side `step`, then the middle of each of its edges, becomes the
                           mean of its four neighbours at distance step/2 plus w · U(−w, w);   then w ← w / decay

with w = 100 at first, so that deviations shrink by decay² a level. At last the map is stretched to [0, 1].
"""

import numpy as np

from featureflock.corruptions.images import Floats, ImageRandom

_FIRST_WIBBLE = 100.0


def plasma(chance: ImageRandom, size: int, decay: float) -> Floats:
    """Maps (B, n, n) between 0 and 1, n the next power of two from `size` on."""
    n = 1 << (size - 1).bit_length()
    map_bnn: Floats = np.zeros((len(chance.index_b), n, n))
    step, wibble, level = n, _FIRST_WIBBLE, 0
    while step >= 2:
        half, k = step // 2, n // step
        noise = wibble * chance.uniform(-wibble, wibble, 3, k, k, stream=level)
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
