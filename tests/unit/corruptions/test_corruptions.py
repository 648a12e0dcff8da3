"""The corruptions against naive implementations of the published algorithms, image by image."""

import itertools

import cv2
import numpy as np
import pytest
import torch
from helpers import corruption_reference as reference

from featureflock.corruptions import CORRUPTIONS, SEVERITIES, corrupt, frost, frost_source
from featureflock.corruptions.blur import directional_blur, shuffle_pixels
from featureflock.corruptions.digital import affine
from featureflock.corruptions.frost import frost_views
from featureflock.corruptions.images import ImageRandom, plasma

SEED = 7


def sample_images(count=4, size=32):
    """Smooth images, one of noise, and one of flat colours with hard edges."""
    rng = ImageRandom(np.arange(3 * count), (99,))
    soft = plasma(rng, size, 1.8)[:, :size, :size].reshape(count, 3, size, size).transpose(0, 2, 3, 1)
    hard = np.random.default_rng(0).integers(0, 256, (2, size, size, 3), dtype=np.uint8)
    hard[1] = 0
    hard[1, :, : size // 2] = 255
    hard[1, : size // 4] = (200, 30, 0)
    return np.concatenate([(255 * soft).astype(np.uint8), hard])


X = sample_images()
INDEX = np.array([0, 3, 4, 11, 12, 9_999])


def rng_of(name, severity):
    """The random numbers that `corrupt` uses for X."""
    return ImageRandom(INDEX, (SEED, CORRUPTIONS.index(name), severity))


def assert_close(got, expected, exact=0.99):
    """Bytes differ by at most 1, and are equal almost everywhere."""
    difference = np.abs(got.astype(int) - np.asarray(expected).astype(int))
    assert difference.max() <= 1
    assert (difference == 0).mean() >= exact


# ---- deterministic corruptions


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("defocus_blur", 0.99),
        ("zoom_blur", 0.95),  # in single precision, as published, where truncation decreases flat regions by one
        ("brightness", 0.95),
        ("contrast", 0.97),
        ("pixelate", 1),
        ("jpeg_compression", 1),
    ],
)
def test_deterministic_corruptions_give_the_published_bytes(name, exact, severity):
    got = corrupt(X, name, severity, seed=SEED, indices=INDEX)
    assert_close(got, [getattr(reference, name)(x, severity) for x in X], exact)
    assert np.array_equal(got, corrupt(X, name, severity, seed=1, indices=INDEX + 1))


def test_brightness_preserves_the_hue_of_all_colours():
    level = np.array([0, 1, 2, 3, 50, 127, 128, 200, 254, 255])
    colours = np.array(list(itertools.product(level, repeat=3)), dtype=np.uint8)
    x = np.resize(colours, (1024, 3)).reshape(1, 32, 32, 3)
    assert_close(corrupt(x, "brightness", 3, seed=0, indices=[0])[0], reference.brightness(x[0], 3), 0.9)


# ---- random corruptions, given the same random numbers


@pytest.mark.parametrize("severity", SEVERITIES)
def test_glass_blur_copies_pixel_by_pixel(severity):
    sigma, iterations = [(0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2)][severity - 1]
    offsets = [rng_of("glass_blur", severity).below(2, 32, 32, 2, stream=i) - 1 for i in range(iterations)]
    expected = []
    for k, x in enumerate(X):
        y = np.uint8(reference.smooth(x / 255, sigma) * 255)
        for offset in offsets:
            reference.glass_shuffle(y, offset[k], 1)
        expected.append(reference.truncated(reference.smooth(y / 255, sigma)))
    assert_close(corrupt(X, "glass_blur", severity, seed=SEED, indices=INDEX), expected)


@pytest.mark.parametrize("delta", [1, 2, 3])
def test_shuffled_pixels_equal_the_published_loop_for_any_distance(delta):
    offsets = ImageRandom(INDEX, (5,)).below(2 * delta, 32, 32, 2) - delta
    assert offsets.min() == -delta
    assert offsets.max() == delta - 1
    got, expected = X.copy(), X.copy()
    shuffle_pixels(got, offsets[..., 0], offsets[..., 1], delta)
    for x, offset in zip(expected, offsets, strict=True):
        reference.glass_shuffle(x, offset, delta)
    assert np.array_equal(got, expected)
    assert not np.array_equal(got, X)


@pytest.mark.parametrize(("radius", "sigma"), [(6, 1), (9, 2.5), (14, 12)])
def test_motion_blur_is_that_of_imagemagick(radius, sigma):
    angles = np.array([0.0, 30.0, -44.9, -90.0, 120.0, 201.3])
    got = directional_blur(X, radius, sigma, angles)
    assert_close(
        got, [reference.magick_motion_blur(x, radius, sigma, a) for x, a in zip(X, angles, strict=True)], 0.999
    )


def test_motion_blur_is_one_sided():
    point = np.zeros((1, 32, 32, 3), dtype=np.uint8)
    point[0, 16, 16] = 255
    row = directional_blur(point, 6, 2.0, np.array([0.0]))[0, 16, :, 0].astype(float)
    weights = np.exp(-(np.arange(13) ** 2) / 8)
    assert np.abs(row[16:3:-1] - 255 * weights / weights.sum()).max() <= 0.5
    assert row[17:].sum() == 0


@pytest.mark.parametrize("severity", SEVERITIES)
def test_motion_blur_uses_its_radius_and_sigma(severity):
    radius, sigma = [(6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)][severity - 1]
    angles = rng_of("motion_blur", severity).uniform(-45, 45)
    expected = [reference.magick_motion_blur(x, radius, sigma, a) for x, a in zip(X[:2], angles, strict=False)]
    assert_close(corrupt(X, "motion_blur", severity, seed=SEED, indices=INDEX)[:2], expected, 0.999)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_snow(severity):
    rng = rng_of("snow", severity)
    normal, angles = rng.normal(0, 1, 32, 32), rng.uniform(-135, -45, stream=1)
    chosen = [0, 1, 4]
    expected = [reference.snow(X[k], severity, normal[k], angles[k]) for k in chosen]
    assert_close(corrupt(X, "snow", severity, seed=SEED, indices=INDEX)[chosen], expected, 0.98)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_fog(severity):
    rng = rng_of("fog", severity)
    noise = [rng.uniform(-1, 1, 3, 2**level, 2**level, stream=level) for level in range(5)]
    expected = [
        reference.fog(x, severity, lambda level, kind, row, column, k=k: noise[level][k, kind, row, column])
        for k, x in enumerate(X)
    ]
    assert_close(corrupt(X, "fog", severity, seed=SEED, indices=INDEX), expected)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_elastic_transform(severity):
    rng = rng_of("elastic_transform", severity)
    moves, fields = rng.uniform(-1, 1, 3, 2), rng.uniform(-1, 1, 2, 32, 32, stream=1)
    expected = [reference.elastic_transform(x, severity, m, f) for x, m, f in zip(X, moves, fields, strict=True)]
    assert_close(corrupt(X, "elastic_transform", severity, seed=SEED, indices=INDEX), expected, 0.98)


def test_the_affine_map_is_opencvs_with_positions_rounded_to_a_32nd_of_a_pixel():
    """OpenCV before version 5 made the published files; newer versions do not round."""
    x, moves = (X / 255).astype(np.float32), rng_of("elastic_transform", 1).uniform(-2.56, 2.56, 3, 2)
    moves = moves.astype(np.float32)
    got = affine(x, moves)
    assert np.abs(got - [reference.affine_map(*each) for each in zip(x, moves, strict=True)]).max() < 1e-5
    points = np.float32([[26, 26], [26, 6], [6, 6]])
    matrices = [cv2.getAffineTransform(points, points + move) for move in moves]
    here = np.array([cv2.warpAffine(a, m, (32, 32), borderMode=4) for a, m in zip(x, matrices, strict=True)])
    old = int(cv2.__version__.split(".")[0]) < 5
    assert np.abs(got - here).max() < (1e-5 if old else 0.04)
    assert np.abs(got - here).mean() < 0.004
    assert np.array_equal(affine(x, 0 * moves), x)


@pytest.mark.parametrize("photographs", [True, False])
def test_frost_is_a_window_of_an_image_of_frost(photographs, monkeypatch):
    frost_views.cache_clear()
    if not photographs:
        monkeypatch.setattr(frost, "_photographs", lambda: None)
        assert frost_source() == "procedural textures"
    elif "procedural" in frost_source():
        pytest.skip("the photographs are not installed")
    else:
        assert frost_source().startswith("the photographs of torch-uncertainty-assets 0")
    views = frost_views(1.0, 32, 32)
    means = np.array([view.mean(axis=(0, 1)) for view in views])
    assert (
        np.abs(means - [[78, 149, 166], [201, 205, 215], [201, 205, 215], [138, 153, 166], [112, 123, 135]]).max() < 3
    )
    count = 400
    black, grey = np.zeros((count, 32, 32, 3), np.uint8), np.full((count, 32, 32, 3), 100, np.uint8)
    on_black = corrupt(black, "frost", 5, seed=0, indices=np.arange(count))
    on_grey = corrupt(grey, "frost", 5, seed=0, indices=np.arange(count))
    assert np.abs(on_grey.astype(int) - 75 - on_black).max() <= 1
    chosen = []
    for y in on_black[:40]:
        windows = [
            k
            for k, view in enumerate(views)
            for h, w in np.argwhere(np.uint8(0.45 * view[: 1 - 32, : 1 - 32, 0]) == y[0, 0, 0])
            if np.array_equal(np.uint8(0.45 * view[h : h + 32, w : w + 32].astype(float)), y)
        ]
        assert windows
        chosen.append(windows[0])
    assert len(set(chosen)) == (4 if photographs else 5)  # the second photograph is used twice
    bright = (on_black.mean(axis=(1, 2, 3)) > 0.45 * 190).mean()
    assert abs(bright - 0.4) < 5 * np.sqrt(0.4 * 0.6 / count)
    frost_views.cache_clear()


# ---- seeds and batches


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_bytes_do_not_depend_on_the_batch(name, monkeypatch):
    x, index = np.concatenate([X, X[:4], X, X[:1]]), np.arange(40, 57)
    expected = corrupt(x, name, 3, seed=SEED, indices=index)
    order = np.random.default_rng(0).permutation(17)
    assert np.array_equal(corrupt(x[order], name, 3, seed=SEED, indices=index[order]), expected[order])
    singly = [corrupt(x[k : k + 1], name, 3, seed=SEED, indices=index[k : k + 1])[0] for k in (0, 5, 16)]
    assert np.array_equal(singly, expected[[0, 5, 16]])
    monkeypatch.setattr("featureflock.corruptions.apply._BATCH", 5)
    assert np.array_equal(corrupt(x, name, 3, seed=SEED, indices=torch.from_numpy(index)), expected)
    planes = np.ascontiguousarray(x.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)  # other strides
    assert np.array_equal(corrupt(planes, name, 3, seed=SEED, indices=index), expected)


@pytest.mark.parametrize(
    "name",
    sorted(set(CORRUPTIONS) - {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"}),
)
def test_seed_and_index_change_the_result(name):
    x = np.repeat(X[:1], 4, axis=0)
    first = corrupt(x, name, 2, seed=0, indices=[0, 1, 2, 3])
    assert all(not np.array_equal(first[0], y) for y in first[1:])
    assert not np.array_equal(first, corrupt(x, name, 2, seed=1, indices=[0, 1, 2, 3]))
    assert np.array_equal(first[1], corrupt(x[:1], name, 2, seed=0, indices=[1])[0])


# ---- other sizes, and wrong arguments


@pytest.mark.parametrize("size", [(24, 24), (28, 28), (64, 64), (48, 40), (33, 96)])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_images_of_other_sizes(name, size):
    x = sample_images(2, max(size))[:3, : size[0], : size[1]]
    for severity in (1, 5):
        y = corrupt(x, name, severity, seed=0, indices=[0, 1, 2])
        assert y.shape == x.shape
        assert y.dtype == np.uint8
        assert not np.array_equal(y, x)
    assert corrupt(x[:0], name, 1, seed=0, indices=np.zeros(0, int)).shape == (0, *size, 3)


@pytest.mark.parametrize("size", [24, 28, 31])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_smaller_images_are_corrupted_as_strongly(name, size):
    small, usual = X[:4, :size, :size], X[:4]
    for severity in SEVERITIES:
        changes = [
            np.abs(corrupt(x, name, severity, seed=0, indices=[0, 1, 2, 3]).astype(float) - x).mean()
            for x in (small, usual)
        ]
        assert changes[0] > 0.4 * changes[1]


def test_blur_grows_with_the_image():
    small = sample_images(2)[:2]
    large = small.repeat(2, axis=1).repeat(2, axis=2)
    for name in ("defocus_blur", "motion_blur", "zoom_blur"):
        a, b = (corrupt(x, name, 5, seed=0, indices=[0, 1]).astype(float) for x in (small, large))
        halved = b.reshape(2, 32, 2, 32, 2, 3).mean(axis=(2, 4))
        assert np.abs(halved - a).mean() < 0.35 * np.abs(small - a).mean(), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corruption": "fogg"}, "There is no corruption 'fogg'; did you mean fog\\?"),
        ({"corruption": "xyz"}, "choose from gaussian_noise, shot_noise"),
        ({"severity": 0}, "severity must be 1, 2, 3, 4 or 5; got 0"),
        ({"severity": 6}, "severity must be"),
        ({"images": X / 255}, "uint8 \\(B, H, W, 3\\); got float64 of shape \\(6, 32, 32, 3\\)"),
        ({"images": X.transpose(0, 3, 1, 2)}, "got uint8 of shape \\(6, 3, 32, 32\\)"),
        ({"images": torch.from_numpy(X)}, "must be a NumPy array"),
        ({"images": X[:, :16]}, "at least 24 pixels on each side"),
        ({"indices": [0, 1]}, "6 integers; got int64 of shape \\(2,\\)"),
        ({"indices": np.arange(6.0)}, "got float64"),
        ({"indices": np.arange(6) - 1}, "from 0 to"),
        ({"seed": -1}, "seed must be from 0"),
        ({"seed": 0.5}, "seed must be an integer; got 0.5"),
        ({"seed": None}, "seed must be an integer; got None"),
        ({"severity": 1.0}, "severity must be an integer; got 1.0"),
        ({"severity": "1"}, "severity must be an integer; got '1'"),
    ],
)
def test_wrong_arguments_are_reported(changes, message):
    arguments = {"images": X, "corruption": "fog", "severity": 1, "seed": 0, "indices": INDEX} | changes
    images, corruption, severity = (arguments.pop(key) for key in ("images", "corruption", "severity"))
    with pytest.raises(ValueError, match=message):
        corrupt(images, corruption, severity, **arguments)


def test_any_integer_type_is_accepted():
    expected = corrupt(X, "fog", 3, seed=4, indices=INDEX)
    for seed, severity in ((np.int8(4), np.int64(3)), (np.uint64(4), np.int64(3)), (np.int64(4), np.uint8(3))):
        assert np.array_equal(corrupt(X, "fog", severity, seed=seed, indices=INDEX.astype(np.uint16)), expected)
