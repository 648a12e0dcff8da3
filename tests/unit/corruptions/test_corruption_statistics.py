"""Random corruptions have the published distributions: moments, frequencies, angles."""

import math

import numpy as np
import pytest
from scipy import stats

from featureflock.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from featureflock.corruptions.images import ImageRandom, plasma
from featureflock.corruptions.noise import _poisson_table

COUNT = 40
INDEX = np.arange(COUNT)
VALUES = COUNT * 3 * 32 * 32


def flat(level):
    return np.full((COUNT, 32, 32, 3), level, dtype=np.uint8)


def corrupted(level, name, severity):
    return corrupt(flat(level), name, severity, seed=3, indices=INDEX)


def within(got, expected, std, *, samples=VALUES):
    """A mean of `samples` values lies within five standard errors of its expectation."""
    assert abs(got - expected) < 5 * std / math.sqrt(samples)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_gaussian_noise(severity):
    c = 255 * [0.04, 0.06, 0.08, 0.09, 0.10][severity - 1]
    y = corrupted(120, "gaussian_noise", severity).astype(float)
    within(y.mean(), 120 - 0.5, math.hypot(c, 0.3))  # truncation subtracts half a level
    variance = c**2 + 1 / 12
    within(((y - 119.5) ** 2).mean(), variance, math.sqrt(2) * variance)
    within(((y - 119.5) ** 3).mean(), 0, math.sqrt(15) * c**3)
    assert stats.kstest(y[:4].ravel() + np.random.default_rng(0).random(4 * 3072), stats.norm(120, c).cdf).pvalue > 1e-4
    assert corrupted(255, "gaussian_noise", severity).max() == 255
    within((corrupted(255, "gaussian_noise", severity) == 255).mean(), 0.5, 0.5)
    within((corrupted(0, "gaussian_noise", severity) == 0).mean(), stats.norm(0, c).cdf(1), 0.5)


def test_noise_is_independent_between_neighbours_channels_and_images():
    y = corrupted(128, "gaussian_noise", 5).astype(float) - 127.5
    unit = y / y.std()
    for shifted in (np.roll(unit, 1, 1), np.roll(unit, 1, 2), np.roll(unit, 1, 3), np.roll(unit, 1, 0)):
        within((unit * shifted).mean(), 0, 1)
    other = corrupted(128, "gaussian_noise", 4).astype(float) - 127.5
    within((unit * other / other.std()).mean(), 0, 1)


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("level", [0, 1, 20, 128])
def test_shot_noise_is_poisson(level, severity):
    c = [500, 250, 100, 75, 50][severity - 1]
    y = corrupted(level, "shot_noise", severity)
    counts = np.arange(5 * c)
    probability = stats.poisson(level / 255 * c).pmf(counts)
    byte = np.uint8(np.clip(counts / c, 0, 1) * 255)
    expected = np.bincount(byte, probability, minlength=256)
    observed = np.bincount(y.ravel(), minlength=256) / y.size
    assert np.abs(observed - expected).max() < 5 * np.sqrt(0.25 / y.size)
    likely = expected * y.size > 5
    assert observed[~likely].sum() < 1e-3
    chi = (y.size * (observed - expected) ** 2 / np.where(likely, expected, 1))[likely].sum()
    assert chi < likely.sum() + 6 * math.sqrt(2 * likely.sum())


def test_the_list_of_poisson_probabilities_is_sorted():
    for c in (500, 50):
        ends, first = _poisson_table(c)
        assert (np.diff(ends) >= 0).all()
        assert len(first) == 256
        assert (ends[first[1:] - 1] == np.arange(1, 256)).all()


@pytest.mark.parametrize("severity", SEVERITIES)
def test_impulse_noise(severity):
    c = [0.01, 0.02, 0.03, 0.05, 0.07][severity - 1]
    y = corrupted(120, "impulse_noise", severity)
    for byte in (0, 255):
        within((y == byte).mean(), c / 2, math.sqrt(c / 2))
    assert set(np.unique(y)) <= {0, 119, 120, 255}
    both = (y != 120).astype(float)
    within((both[..., 0] * both[..., 1]).mean(), c**2, c, samples=VALUES / 3)  # channels are independent


def test_impulse_noise_truncates_the_other_pixels_as_published():
    ramp = np.resize(np.arange(256, dtype=np.uint8), (COUNT, 32, 32, 3))
    y = corrupt(ramp, "impulse_noise", 1, seed=0, indices=INDEX)
    hit = (y == 0) | (y == 255)
    assert np.array_equal(y[~hit], np.uint8(ramp[~hit] / 255.0 * 255))


@pytest.mark.parametrize(("name", "low", "high"), [("motion_blur", -45, 45), ("snow", -135, -45)])
def test_angles_are_uniform(name, low, high):
    rng = ImageRandom(np.arange(4000), (0, CORRUPTIONS.index(name), 1))
    angles = rng.uniform(low, high, stream=int(name == "snow"))
    assert stats.kstest(angles, stats.uniform(low, high - low).cdf).pvalue > 1e-3


def test_motion_follows_the_angle():
    """A point becomes a line to its left, in the direction of the angle in (−45°, 45°)."""
    point = np.zeros((400, 32, 32, 3), dtype=np.uint8)
    point[:, 16, 16] = 255
    y = corrupt(point, "motion_blur", 5, seed=0, indices=np.arange(400))[..., 0].astype(float)
    weight = y / y.sum(axis=(1, 2), keepdims=True)
    row, column = ((weight * (np.indices((32, 32))[k] - 16)).sum(axis=(1, 2)) for k in (0, 1))
    angles = np.degrees(np.arctan2(-row, -column))
    assert column.max() < 0
    drawn = ImageRandom(np.arange(400), (0, CORRUPTIONS.index("motion_blur"), 5)).uniform(-45, 45)
    assert np.abs(angles - drawn).max() < 8  # points of a line are rounded to pixels
    assert np.corrcoef(angles, drawn)[0, 1] > 0.98
    within(angles.mean(), 0, 26, samples=400)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_snow_falls_down_and_whitens(severity):
    y = corrupted(60, "snow", severity).astype(float)
    assert y.mean() > 60
    flakes = y - y.min(axis=(1, 2, 3), keepdims=True)
    across = np.abs(np.diff(flakes, axis=2)).mean()
    down = np.abs(np.diff(flakes, axis=1)).mean()
    assert down < 0.75 * across  # streaks are vertical
    assert np.array_equal(y[..., 0], y[..., 1])


@pytest.mark.parametrize("decay", [3, 1.75])
def test_plasma_is_as_rough_as_the_published_one(decay):
    """Increments at each distance are distributed as those of an independent implementation."""
    maps = plasma(ImageRandom(np.arange(600), (1,)), 32, decay)
    assert maps.min() == 0
    assert maps.max() == 1
    assert ((maps == 0).sum(axis=(1, 2)) == 1).all()
    generator = np.random.default_rng(0)
    published = np.array([_plasma_by_generator(generator, decay) for _ in range(600)])
    for lag in (1, 2, 4, 8):
        ours, theirs = (np.abs(m - np.roll(m, lag, 2)).mean(axis=(1, 2)) for m in (maps, published))
        assert stats.ks_2samp(ours, theirs).pvalue > 1e-3
    assert stats.ks_2samp(maps.mean(axis=(1, 2)), published.mean(axis=(1, 2))).pvalue > 1e-3


def _plasma_by_generator(generator, decay):
    """An independent implementation: all midpoints as shifted sums on the torus."""
    heights, step, wibble = np.zeros((32, 32)), 32, 100.0
    while step > 1:
        half = step // 2
        around = [np.roll(heights, (a * half, b * half), (0, 1)) for a in (-1, 1) for b in (-1, 1)]
        fresh = sum(around) / 4 + wibble * generator.uniform(-wibble, wibble, heights.shape)
        heights[half::step, half::step] = fresh[half::step, half::step]
        around = [np.roll(heights, half * s, axis) for s in (-1, 1) for axis in (0, 1)]
        fresh = sum(around) / 4 + wibble * generator.uniform(-wibble, wibble, heights.shape)
        for rows, columns in ((0, half), (half, 0)):
            heights[rows::step, columns::step] = fresh[rows::step, columns::step]
        step, wibble = half, wibble / decay
    heights -= heights.min()
    return heights / heights.max()


@pytest.mark.parametrize("severity", SEVERITIES)
def test_glass_blur_draws_from_the_four_pixels_up_and_left(severity):
    """On a ramp, a pixel gets its own value or its neighbour's with equal probability in each iteration."""
    sigma, iterations = [(0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2)][severity - 1]
    ramp = np.zeros((COUNT, 32, 32, 3), dtype=np.uint8)
    ramp[:] = (4 * np.arange(32) + 20)[:, None]
    moved = corrupt(ramp, "glass_blur", severity, seed=0, indices=INDEX).astype(float) - ramp
    inner = moved[:, 6:28, 6:28, 0] + (1 if sigma > 0.1 else 0)  # smoothing truncates twice
    samples = inner.size / 9
    assert abs(inner.mean() + 2 * iterations) < 0.6 + 5 * 2 * math.sqrt(iterations / samples)
    if sigma == 0.05:
        assert set(np.unique(moved[:, 2:, 2:])) <= {-5, -4, -1, 0}
        assert not (moved[:, :2] + (moved[:, :2] == -1)).any()


@pytest.mark.parametrize("severity", SEVERITIES)
def test_elastic_transform_moves_points_as_far_as_published(severity):
    affine = 32 * [0.08, 0.07, 0.06, 0.05, 0.03][severity - 1]
    rng = ImageRandom(np.arange(2000), (0, CORRUPTIONS.index("elastic_transform"), severity))
    moves = rng.uniform(-affine, affine, 3, 2)
    assert np.abs(moves).max() <= affine
    within((moves**2).mean(), affine**2 / 3, affine**2 * math.sqrt(4 / 45), samples=12_000)
    point = np.zeros((1000, 32, 32, 3), dtype=np.uint8)
    point[:, 15:18, 15:18] = 255  # centred between the first and the last point
    y = corrupt(point, "elastic_transform", severity, seed=0, indices=np.arange(1000))[..., 0].astype(float)
    row = (y.sum(axis=2) * np.arange(32)).sum(axis=1) / y.sum(axis=(1, 2)) - 16
    alpha, sigma = [(0, 0), (1.6, 6.4), (2.56, 1.92), (3.2, 1.28), (3.2, 0.96)][severity - 1]
    expected = affine**2 / 6
    if severity == 1:
        assert row.var() == pytest.approx(expected, rel=0.2)
    elif severity > 2:
        assert row.var() > expected  # the local displacement adds to it
    assert alpha >= sigma or severity == 2
