"""Examples in memory: normalisation, labels, stratified splits."""

import math

import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from featureflock.data import CustomData, EpochKey, Normalisation, Splits, TensorExamples, from_dataset

CPU = torch.device("cpu")


def test_evaluation_normalises_without_augmentation():
    x = torch.randint(0, 256, (20, 3, 9, 7), dtype=torch.uint8)
    normalisation = Normalisation((100.0, 110.0, 120.0), (50.0, 60.0, 70.0))
    examples = TensorExamples(x, torch.arange(20), normalisation=normalisation, padding=4, flip=True)
    batch = next(examples.batches([torch.arange(5, 12)], CPU))
    mean, std = torch.tensor(normalisation.mean).view(3, 1, 1), torch.tensor(normalisation.std).view(3, 1, 1)
    assert_close(batch.x, (x[5:12].float() - mean) / std)
    assert batch.y.tolist() == list(range(5, 12))


def test_floats_are_unchanged():
    x = torch.randn(6, 5, dtype=torch.float64)
    assert torch.equal(next(TensorExamples(x, torch.arange(6)).batches([torch.arange(6)], CPU, EpochKey(0, 0))).x, x)


def test_bytes_without_a_normalisation_are_scaled_to_0_to_1():
    x = torch.tensor([[0, 51, 255]], dtype=torch.uint8)
    y = torch.zeros(1, dtype=torch.int64)
    for examples in (TensorExamples(x, y), from_dataset(TensorDataset(x, y))):
        assert_close(next(examples.batches([torch.zeros(1, dtype=torch.int64)], CPU)).x, torch.tensor([[0, 0.2, 1.0]]))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(5, 2), torch.zeros(4, dtype=torch.int64), "5 inputs but 4 labels"),
        (torch.zeros(5, 2), torch.zeros(5), "must be integers"),
        (torch.zeros(5, 2), torch.zeros(5, 2), "needs integer class indices"),
        (torch.zeros(5, 2), torch.tensor([0, 1, -1, 0, 1]), "the smallest is -1"),
        (torch.full((5, 2), math.nan), torch.zeros(5, dtype=torch.int64), "NaN or infinite"),
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), "test sets must have examples"),
    ],
)
def test_wrong_arrays_are_refused(x, y, message):
    with pytest.raises(ValueError, match=message):
        CustomData((x, y), (torch.zeros(5, 2), torch.zeros(5, dtype=torch.int64))).load()


def splits(labels: torch.Tensor) -> Splits:
    x = torch.arange(len(labels)).float()[:, None]
    return Splits(TensorExamples(x, labels), TensorExamples(x, labels), 1 + int(labels.max()))


def test_subset_and_validation_are_balanced_disjoint_and_seeded():
    labels = torch.arange(1000) % 10
    result = splits(labels).split(validation=100, subset=205, seed=3)
    held_out, used = result.validation.indices.tolist(), result.train.indices.tolist()
    assert not set(held_out) & set(used)
    assert torch.bincount(result.validation.labels).tolist() == [10] * 10
    counts = torch.bincount(result.train.labels)
    assert int(counts.sum()) == 205
    assert sorted(counts.tolist()) == [20] * 5 + [21] * 5
    again = splits(labels).split(validation=100, subset=205, seed=3)
    assert again.train.indices.tolist() == used
    assert splits(labels).split(validation=100, subset=205, seed=4).train.indices.tolist() != used
    assert splits(labels).split(validation=100, seed=3).validation.indices.tolist() == held_out
    assert len(result.test) == 1000


def test_a_small_class_is_used_completely():
    labels = torch.tensor([0] * 500 + [1] * 500 + [2] * 7)
    counts = torch.bincount(splits(labels).split(subset=107).train.labels)
    assert counts.tolist() == [50, 50, 7]


@pytest.mark.parametrize("wrong", [{"subset": 101}, {"subset": 0}, {"validation": 100}, {"validation": -1}])
def test_impossible_subsets_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must .*100|must .*99"):
        splits(torch.arange(100) % 10).split(**wrong)


@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        ([0, 1, 3], (), "The labels of 3 classes are 0 to 2; got 3"),
        ([0, 1, 2], ("cat", "dog"), "a name for each of 3 classes or none; got 2"),
    ],
)
def test_labels_and_class_names_must_match_the_number_of_classes(labels, names, message):
    right, given = (TensorExamples(torch.zeros(3, 2), torch.tensor(y)) for y in ([0, 1, 2], labels))
    with pytest.raises(ValueError, match=message):
        Splits(right, given, classes=3, class_names=names)
