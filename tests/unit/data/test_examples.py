"""Batches: augmentation against a naive loop, randomness, subsets, data of one's own."""

import math
import random

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from featureflock.data import (
    CustomData,
    Digits,
    EpochKey,
    Normalisation,
    Splits,
    TensorExamples,
    crop_and_flip,
    from_dataset,
)
from featureflock.data.rng import below, permutation, random_bits, uniform

CPU = torch.device("cpu")


def pictures(count: int, height: int = 9, width: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(1, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)


# Random numbers


def test_python_and_tensors_draw_the_same_numbers():
    index = torch.arange(1000)
    bits = random_bits(3, 7, index, 1)
    assert bits.tolist() == [random_bits(3, 7, i, 1) for i in range(1000)]
    assert int(bits.min()) >= 0
    assert int(bits.max()) < 2**32


def test_numbers_are_uniform_and_independent_of_their_neighbours():
    index = torch.arange(200_000)
    u = random_bits(0, 0, index, 0) / 2**32
    assert abs(float(u.mean()) - 0.5) < 4 / math.sqrt(12 * len(u))
    counts = torch.bincount((u * 100).long(), minlength=100).double()
    chi_square = float(((counts - 2000) ** 2 / 2000).sum())
    assert 99 - 5 * math.sqrt(198) < chi_square < 99 + 5 * math.sqrt(198)
    for other in (random_bits(0, 0, index + 1, 0), random_bits(0, 1, index, 0), random_bits(1, 0, index, 0)):
        correlation = torch.corrcoef(torch.stack([u, other / 2**32]))[0, 1]
        assert abs(float(correlation)) < 5 / math.sqrt(len(u))


def test_integers_below_a_bound_are_all_as_likely():
    counts = torch.bincount(below(9, 5, 2, torch.arange(90_000), 0), minlength=9)
    assert len(counts) == 9
    assert float((counts - 10_000).abs().max()) < 5 * math.sqrt(10_000)


def test_an_order_is_a_permutation_of_its_own_for_each_epoch():
    orders = [permutation(100, 0, 1, epoch) for epoch in range(3)]
    assert all(order.sort().values.tolist() == list(range(100)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 3
    assert torch.equal(permutation(100, 0, 1, 2), orders[2])


# Crop and flip


def naive_crop_and_flip(x, index, draw, padding, flip):
    """One picture at a time, with Python's loops."""
    out = torch.zeros_like(x)
    _, channels, height, width = x.shape
    for b, i in enumerate(index.tolist()):
        top = random_bits(draw.seed, draw.epoch, i, 0) * (2 * padding + 1) >> 32
        left = random_bits(draw.seed, draw.epoch, i, 1) * (2 * padding + 1) >> 32
        mirror = flip and random_bits(draw.seed, draw.epoch, i, 2) >> 31 == 1
        for row in range(height):
            for column in range(width):
                from_row, from_column = row + top - padding, column + left - padding
                if 0 <= from_row < height and 0 <= from_column < width:
                    target = width - 1 - column if mirror else column
                    for channel in range(channels):
                        out[b, channel, row, target] = x[b, channel, from_row, from_column]
    return out


@pytest.mark.parametrize(("padding", "flip"), [(0, False), (4, False), (0, True), (4, True)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_crop_and_flip_is_the_naive_loop(padding, flip, layout):
    x, index = pictures(40).contiguous(memory_format=layout), torch.arange(100, 140)
    got = crop_and_flip(x, index, EpochKey(3, 5), padding=padding, flip=flip)
    assert torch.equal(got, naive_crop_and_flip(x, index, EpochKey(3, 5), padding, flip))
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_every_window_and_both_mirror_images_come_as_often():
    x = torch.zeros(8100, 1, 9, 9, dtype=torch.uint8)
    x[:, :, 4, 4] = 1  # where the middle pixel goes tells the window
    windows = crop_and_flip(x, torch.arange(8100), EpochKey(0, 0), padding=4, flip=True).flatten(1).argmax(1)
    counts = torch.bincount(windows, minlength=81)
    assert float((counts - 100).abs().max()) < 5 * math.sqrt(100)
    x[:, :, 4, 8] = 2  # and a pixel at the right edge the side
    mirrored = crop_and_flip(x, torch.arange(8100), EpochKey(0, 0), padding=0, flip=True).flatten(1).argmax(1) == 36
    assert abs(int(mirrored.sum()) - 4050) < 5 * math.sqrt(8100 / 4)


def test_what_a_picture_gets_depends_on_seed_epoch_and_index_alone():
    examples = TensorExamples(pictures(50), torch.zeros(50, dtype=torch.int64), padding=4, flip=True)
    everything = next(examples.batches([torch.arange(50)], CPU, EpochKey(1, 2))).x
    order = permutation(50, 9)
    shuffled = torch.cat([batch.x for batch in examples.batches(order.split(7), CPU, EpochKey(1, 2))])
    assert torch.equal(shuffled, everything[order])
    some = examples.select(torch.tensor([30, 4, 17]))  # a subset, or another process's share
    assert torch.equal(next(some.batches([torch.arange(3)], CPU, EpochKey(1, 2))).x, everything[[30, 4, 17]])
    for other in (EpochKey(1, 3), EpochKey(2, 2)):
        assert not torch.equal(next(examples.batches([torch.arange(50)], CPU, other)).x, everything)


def test_evaluation_is_without_augmentation_and_normalised():
    x = pictures(20)
    normalisation = Normalisation((100.0, 110.0, 120.0), (50.0, 60.0, 70.0))
    examples = TensorExamples(x, torch.arange(20), normalisation=normalisation, padding=4, flip=True)
    batch = next(examples.batches([torch.arange(5, 12)], CPU))
    mean, deviation = torch.tensor(normalisation.mean).view(3, 1, 1), torch.tensor(normalisation.std).view(3, 1, 1)
    assert_close(batch.x, (x[5:12].float() - mean) / deviation)
    assert batch.y.tolist() == list(range(5, 12))


def test_floats_are_used_as_they_are():
    x = torch.randn(6, 5, dtype=torch.float64)
    assert torch.equal(next(TensorExamples(x, torch.arange(6)).batches([torch.arange(6)], CPU, EpochKey(0, 0))).x, x)


# Subsets and validation


def splits(labels: torch.Tensor) -> Splits:
    x = torch.arange(len(labels)).float()[:, None]
    return Splits(TensorExamples(x, labels), TensorExamples(x, labels), 1 + int(labels.max()))


def test_subset_and_validation_are_balanced_disjoint_and_seeded():
    labels = torch.arange(1000) % 10
    divided = splits(labels).split(validation=100, subset=205, seed=3)
    held_out, used = divided.validation.indices.tolist(), divided.train.indices.tolist()
    assert not set(held_out) & set(used)
    assert torch.bincount(divided.validation.labels).tolist() == [10] * 10
    counts = torch.bincount(divided.train.labels)
    assert int(counts.sum()) == 205
    assert sorted(counts.tolist()) == [20] * 5 + [21] * 5
    again = splits(labels).split(validation=100, subset=205, seed=3)
    assert again.train.indices.tolist() == used
    assert splits(labels).split(validation=100, subset=205, seed=4).train.indices.tolist() != used
    assert splits(labels).split(validation=100, seed=3).validation.indices.tolist() == held_out
    assert len(divided.test) == 1000


def test_a_small_class_gives_all_it_has():
    labels = torch.tensor([0] * 500 + [1] * 500 + [2] * 7)
    counts = torch.bincount(splits(labels).split(subset=107).train.labels)
    assert counts.tolist() == [50, 50, 7]


@pytest.mark.parametrize("wrong", [{"subset": 101}, {"subset": 0}, {"validation": 100}, {"validation": -1}])
def test_impossible_subsets_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must .*100|must .*99"):
        splits(torch.arange(100) % 10).split(**wrong)


def test_digits_are_real_and_apart():
    data = Digits().load()
    assert (len(data.train), len(data.test), data.classes) == (1200, 597, 10)
    train, test = ({x.numpy().tobytes() for x in part.x} for part in (data.train, data.test))
    assert len(train & test) < 5  # scikit-learn's digits have hardly any twins
    assert Digits(views=2).load().train.shape == (1, 8, 16)


# Data of one's own


class Noisy(Dataset):
    """Items whose transform draws from all three sources of random numbers."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        noise = torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002
        return torch.tensor([index, float(noise)]), index % 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_with_random_transforms_repeats_itself(workers):
    examples = from_dataset(Noisy(), workers=workers)
    assert examples.labels.tolist() == [i % 3 for i in range(30)]
    order = permutation(30, 1)
    x = next(examples.batches([order], CPU, EpochKey(0, 4))).x
    assert x[:, 0].tolist() == order.tolist()
    assert torch.equal(torch.cat([b.x for b in examples.batches(list(order.split(4)), CPU, EpochKey(0, 4))]), x)
    assert not torch.equal(next(examples.batches([order], CPU, EpochKey(0, 5))).x, x)
    assert len(set(x[:, 1].tolist())) == 30


def test_own_bytes_are_normalised_by_the_training_pictures():
    x = pictures(200)
    data = CustomData((x, torch.arange(200) % 4), (x[:10], torch.arange(10) % 4)).load()
    batch = next(data.train.batches([torch.arange(200)], CPU)).x.double()
    assert_close(batch.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float64), atol=1e-5, rtol=0)
    assert_close(batch.std((0, 2, 3), correction=0), torch.ones(3, dtype=torch.float64), atol=1e-5, rtol=0)
    assert data.classes == 4


class Sometimes(Noisy):
    def __getitem__(self, index):
        if index in (3, 8):
            raise OSError("no such file")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_items_of_a_dataset_that_cannot_be_read_are_left_out(workers):
    with pytest.warns(
        UserWarning, match=r"2 of 30 items cannot be read and are left out, first item 3 \(no such file\)"
    ):
        examples = from_dataset(Sometimes(), workers=workers)
    assert examples.indices.tolist() == [i for i in range(30) if i not in (3, 8)]
    x = next(examples.batches([torch.arange(28)], CPU)).x
    assert x[:, 0].tolist() == examples.indices.tolist()


def test_datasets_that_cannot_be_used_get_words():
    class Stream(IterableDataset):
        def __iter__(self):
            yield torch.zeros(1), 0

    y = torch.zeros(5, dtype=torch.int64)
    with pytest.raises(ValueError, match="IterableDataset has no indices"):
        CustomData(Stream(), (torch.zeros(5, 2), y)).load()
    with pytest.raises(ValueError, match="use the transforms of your Dataset"):
        CustomData(Noisy(), Noisy(), padding=4).load()
    with pytest.raises(TypeError, match="got int"):
        CustomData(3, (torch.zeros(5, 2), y)).load()


def test_bytes_without_a_scale_become_numbers_from_0_to_1():
    x = torch.tensor([[0, 51, 255]], dtype=torch.uint8)
    y = torch.zeros(1, dtype=torch.int64)
    for examples in (TensorExamples(x, y), from_dataset(TensorDataset(x, y))):
        assert_close(next(examples.batches([torch.zeros(1, dtype=torch.int64)], CPU)).x, torch.tensor([[0, 0.2, 1.0]]))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(5, 2), torch.zeros(4, dtype=torch.int64), "5 inputs but 4 labels"),
        (torch.zeros(5, 2), torch.zeros(5), "must be integers"),
        (torch.zeros(5, 2), torch.zeros(5, 2, dtype=torch.int64), "must be integers"),
        (torch.zeros(5, 2), torch.tensor([0, 1, -1, 0, 1]), "the smallest is -1"),
        (torch.full((5, 2), math.nan), torch.zeros(5, dtype=torch.int64), "NaN or infinite"),
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), "Both parts need examples"),
    ],
)
def test_wrong_arrays_get_a_sentence(x, y, message):
    with pytest.raises(ValueError, match=message):
        CustomData((x, y), (torch.zeros(5, 2), torch.zeros(5, dtype=torch.int64))).load()


def test_uniform_is_below_one():
    assert max(uniform(0, i) for i in range(10_000)) < 1
