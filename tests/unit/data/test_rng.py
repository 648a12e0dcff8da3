"""Counter-based random numbers: distributions, keys and streams."""

import math

import numpy as np
import torch

from featureflock.corruptions.images import ImageRandom
from featureflock.data.rng import (
    Stream,
    below,
    cell_bits,
    cell_uniforms,
    permutation,
    random_bits,
    uniform,
)


def test_python_and_tensors_give_the_same_numbers():
    index = torch.arange(1000)
    bits = random_bits(3, 7, index, 1)
    assert bits.tolist() == [random_bits(3, 7, i, 1) for i in range(1000)]
    assert int(bits.min()) >= 0
    assert int(bits.max()) < 2**32


def test_numbers_of_neighbouring_keys_are_uniform_and_independent():
    index = torch.arange(200_000)
    u = random_bits(0, 0, index, 0) / 2**32
    assert abs(float(u.mean()) - 0.5) < 4 / math.sqrt(12 * len(u))
    counts = torch.bincount((u * 100).long(), minlength=100).double()
    chi_square = float(((counts - 2000) ** 2 / 2000).sum())
    assert 99 - 5 * math.sqrt(198) < chi_square < 99 + 5 * math.sqrt(198)
    for other in (random_bits(0, 0, index + 1, 0), random_bits(0, 1, index, 0), random_bits(1, 0, index, 0)):
        correlation = torch.corrcoef(torch.stack([u, other / 2**32]))[0, 1]
        assert abs(float(correlation)) < 5 / math.sqrt(len(u))


def test_integers_below_a_bound_are_uniform():
    counts = torch.bincount(below(9, 5, 2, torch.arange(90_000), 0), minlength=9)
    assert len(counts) == 9
    assert float((counts - 10_000).abs().max()) < 5 * math.sqrt(10_000)


def test_each_epoch_has_its_own_permutation():
    orders = [permutation(100, 0, 1, epoch) for epoch in range(3)]
    assert all(order.sort().values.tolist() == list(range(100)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 3
    assert torch.equal(permutation(100, 0, 1, 2), orders[2])


def test_uniform_is_below_one():
    assert max(uniform(0, i) for i in range(10_000)) < 1


def test_cell_numbers_are_those_of_their_keys():
    index = np.array([0, 5, 2**32 - 1])
    bits = cell_bits((2, 3), index, 1, 2)
    for k, i in enumerate(index):
        for c in range(6):
            assert bits[k].reshape(-1)[c] == random_bits(1, 2, int(i), random_bits(c))
    assert torch.equal(
        torch.from_numpy(cell_uniforms((), index, 1) * 2**32 - 0.5).long()[0],
        torch.tensor(int(cell_bits((), index, 1)[0])),
    )
    z = ImageRandom(index, (3,)).normal(0, 1, 1000, 100)
    assert np.abs(z.mean(axis=(1, 2))).max() < 5 / np.sqrt(1e5)
    assert np.abs(z.std(axis=(1, 2)) - 1).max() < 5 / np.sqrt(2e5)
    assert abs((z**4).mean() - 3) < 5 * np.sqrt(96 / 3e5)
    assert np.abs(np.corrcoef(z.reshape(3, -1)) - np.eye(3)).max() < 5 / np.sqrt(1e5)


def test_streams_are_pinned():
    """Other values would change the splits, orders and corruptions of published results."""
    assert {name: int(stream) for name, stream in Stream.__members__.items()} == {
        "CROP_TOP": 0,
        "CROP_LEFT": 1,
        "FLIP": 2,
        "FILE_FLIP": 0,
        "FILE_CROP": 1,
        "VALIDATION": 1,
        "SUBSET": 2,
        "TEST_SUBSET": 3,
        "EPOCH_ORDER": 1,
        "TRAINING_STEP": 2,
        "REDUNDANCY_FIT": 1,
        "REDUNDANCY_ESTIMATE": 2,
        "DIGITS_SPLIT": 0,
        "DATA_DEPENDENT_INIT": 3,
        "TABULAR_SPLIT": 4,
        "OOD_NOISE": 0x401,
        "DOMINO_PAIRS": 0x501,
        "FROST_TEXTURE": 0xF205,
    }
    assert random_bits(0, Stream.VALIDATION, torch.tensor([5])).tolist() == [random_bits(0, 1, 5)]
