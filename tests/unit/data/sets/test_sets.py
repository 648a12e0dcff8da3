"""Data sets: the registry, digits, held-out and custom data."""

import random
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import Dataset, IterableDataset

from featureflock.data import (
    CIFAR10,
    DATA_SETS,
    CustomData,
    DataSet,
    Digits,
    EpochKey,
    FashionMNIST,
    HeldOut,
    Splits,
    TensorExamples,
    from_dataset,
)
from featureflock.data.rng import permutation
from featureflock.data.sources.registry import PUBLISHED_SETS

CPU = torch.device("cpu")


@patch.dict(DATA_SETS)  # removes what the test adds
def test_the_registry_has_every_data_set_that_a_recipe_can_name():
    assert DATA_SETS.name_of(FashionMNIST(padding=0)) == "fashion-mnist"
    assert DATA_SETS.name_of(CustomData(None, None)) is None
    for name, published in PUBLISHED_SETS.items():
        data_set = DATA_SETS[name]
        assert data_set.published == name
        assert len(data_set.normalisation.mean) == published.shape[2]
    with pytest.raises(ValueError, match=r"There is no data set 'cifar'; did you mean cifar10\?"):
        DATA_SETS["cifar"]

    @DATA_SETS.register("ones")
    @dataclass(frozen=True)
    class Ones(DataSet):
        count: int = 4

        def load(self) -> Splits:
            examples = TensorExamples(torch.ones(self.count, 2), torch.arange(self.count) % 2)
            return Splits(examples, examples, 2)

    assert len(DATA_SETS["ones"](count=6).load().train) == 6
    with pytest.raises(ValueError, match="already a data set called 'cifar10'"):
        DATA_SETS.add("cifar10", Ones)


def test_sizes_for_cost_estimates_agree_with_the_published_sets():
    published = PUBLISHED_SETS["cifar10"]
    height, width, channels = published.shape
    assert (CIFAR10.train_size, CIFAR10.input_shape) == (published.train, (channels, height, width))
    assert Digits().train_size is None


def test_held_out_data_leaves_the_test_set_alone():
    data, test = HeldOut(Digits(), 100, seed=3).load(), Digits().load().test
    assert (len(data.train), len(data.test), data.validation) == (1100, 100, None)
    assert set(data.test.indices.tolist()).isdisjoint(data.train.indices.tolist())
    images = {x.numpy().tobytes() for x in test.x}
    assert sum(x.numpy().tobytes() in images for x in data.test.x) < 5  # few duplicates


def random_images(count: int, height: int = 9, width: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(1, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)


def test_digits_have_separate_training_and_test_scans():
    data = Digits().load()
    assert (len(data.train), len(data.test), data.classes) == (1200, 597, 10)
    train, test = ({x.numpy().tobytes() for x in part.x} for part in (data.train, data.test))
    assert len(train & test) < 5  # scikit-learn's digits have few duplicates
    assert Digits(views=2).load().train.shape == (1, 8, 16)


def test_custom_bytes_are_normalised_by_the_training_images():
    x = random_images(200)
    data = CustomData((x, torch.arange(200) % 4), (x[:10], torch.arange(10) % 4)).load()
    batch = next(data.train.batches([torch.arange(200)], CPU)).x.double()
    assert_close(batch.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float64), atol=1e-5, rtol=0)
    assert_close(batch.std((0, 2, 3), correction=0), torch.ones(3, dtype=torch.float64), atol=1e-5, rtol=0)
    assert data.classes == 4


class Noisy(Dataset):
    """Items whose transform uses the generators of PyTorch, Python and NumPy."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        noise = torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002
        return torch.tensor([index, float(noise)]), index % 3


@pytest.mark.parametrize("workers", [0, 2])
def test_random_transforms_of_a_dataset_are_reproducible(workers):
    examples = from_dataset(Noisy(), workers=workers)
    assert examples.labels.tolist() == [i % 3 for i in range(30)]
    order = permutation(30, 1)
    x = next(examples.batches([order], CPU, EpochKey(0, 4))).x
    assert x[:, 0].tolist() == order.tolist()
    assert torch.equal(torch.cat([b.x for b in examples.batches(list(order.split(4)), CPU, EpochKey(0, 4))]), x)
    assert not torch.equal(next(examples.batches([order], CPU, EpochKey(0, 5))).x, x)
    assert len(set(x[:, 1].tolist())) == 30


class PartlyUnreadable(Noisy):
    def __getitem__(self, index):
        if index in (3, 8):
            raise OSError("no such file")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_items_of_a_dataset_are_left_out(workers):
    with pytest.warns(
        UserWarning, match=r"2 of 30 items cannot be read and are left out; the first is item 3 \(no such file\)"
    ):
        examples = from_dataset(PartlyUnreadable(), workers=workers)
    assert examples.indices.tolist() == [i for i in range(30) if i not in (3, 8)]
    x = next(examples.batches([torch.arange(28)], CPU)).x
    assert x[:, 0].tolist() == examples.indices.tolist()


def test_unsupported_custom_data_is_refused():
    class Endless(IterableDataset):
        def __iter__(self):
            yield torch.zeros(1), 0

    y = torch.zeros(5, dtype=torch.int64)
    with pytest.raises(ValueError, match="IterableDataset has no indices"):
        CustomData(Endless(), (torch.zeros(5, 2), y)).load()
    with pytest.raises(ValueError, match="use the transforms of your Dataset"):
        CustomData(Noisy(), Noisy(), padding=4).load()
    with pytest.raises(ValueError, match="got int"):
        CustomData(3, (torch.zeros(5, 2), y)).load()
