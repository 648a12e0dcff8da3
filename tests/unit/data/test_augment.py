"""Random crops and flips against a naive loop, and their distribution."""

import math

import pytest
import torch

from featureflock.data import EpochKey, TensorExamples
from featureflock.data.augment import crop_and_flip
from featureflock.data.rng import permutation, random_bits

CPU = torch.device("cpu")


def random_images(count: int, height: int = 9, width: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(1, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)


def naive_crop_and_flip(x, index, key, padding, flip):
    """Crop and flip pixel by pixel."""
    out = torch.zeros_like(x)
    _, channels, height, width = x.shape
    for b, i in enumerate(index.tolist()):
        top = random_bits(key.seed, key.epoch, i, 0) * (2 * padding + 1) >> 32
        left = random_bits(key.seed, key.epoch, i, 1) * (2 * padding + 1) >> 32
        mirror = flip and random_bits(key.seed, key.epoch, i, 2) >> 31 == 1
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
def test_crop_and_flip_equals_a_naive_loop(padding, flip, layout):
    x, index = random_images(40).contiguous(memory_format=layout), torch.arange(100, 140)
    got = crop_and_flip(x, index, EpochKey(3, 5), padding=padding, flip=flip)
    assert torch.equal(got, naive_crop_and_flip(x, index, EpochKey(3, 5), padding, flip))
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_all_crops_and_both_flips_are_equally_likely():
    x = torch.zeros(8100, 1, 9, 9, dtype=torch.uint8)
    x[:, :, 4, 4] = 1  # its position identifies the crop
    windows = crop_and_flip(x, torch.arange(8100), EpochKey(0, 0), padding=4, flip=True).flatten(1).argmax(1)
    counts = torch.bincount(windows, minlength=81)
    assert float((counts - 100).abs().max()) < 5 * math.sqrt(100)
    x[:, :, 4, 8] = 2  # its side identifies the flip
    mirrored = crop_and_flip(x, torch.arange(8100), EpochKey(0, 0), padding=0, flip=True).flatten(1).argmax(1) == 36
    assert abs(int(mirrored.sum()) - 4050) < 5 * math.sqrt(8100 / 4)


def test_augmentation_depends_on_seed_epoch_and_index_only():
    examples = TensorExamples(random_images(50), torch.zeros(50, dtype=torch.int64), padding=4, flip=True)
    everything = next(examples.batches([torch.arange(50)], CPU, EpochKey(1, 2))).x
    order = permutation(50, 9)
    shuffled = torch.cat([batch.x for batch in examples.batches(order.split(7), CPU, EpochKey(1, 2))])
    assert torch.equal(shuffled, everything[order])
    some = examples.select(torch.tensor([30, 4, 17]))  # a subset, or the part of another process
    assert torch.equal(next(some.batches([torch.arange(3)], CPU, EpochKey(1, 2))).x, everything[[30, 4, 17]])
    for other in (EpochKey(1, 3), EpochKey(2, 2)):
        assert not torch.equal(next(examples.batches([torch.arange(50)], CPU, other)).x, everything)
