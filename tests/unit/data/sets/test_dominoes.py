"""Dominoes: pairs of a digit and an image, and the normalisation of both halves."""

import pytest
import torch
from helpers.small_published_sets import small_sets
from torch.testing import assert_close

from featureflock.data import Dominoes, Normalisation
from featureflock.data.sets.dominoes import match_digits


def test_a_domino_is_a_digit_above_an_image_of_its_class(temp_cache):
    small_sets()
    splits = Dominoes().load()
    for part, size in ((splits.train, 20), (splits.test, 10)):
        assert part.shape == (3, 64, 32)
        assert len(part) == size
        for k in range(size):
            digit = part.x[k, :, 2:30, 2:30]
            assert bool((digit == 10 * int(part.labels[k]) + 5).all())
            assert bool((part.x[k, :, 32:] == k).all())  # each image once, in its order
        margin = part.x[:, :, :32].clone()
        margin[:, :, 2:30, 2:30] = 0
        assert int(margin.sum()) == 0
    assert splits.class_names[3] == "3 cat"


def test_pairs_depend_on_the_seed_and_use_all_digits_equally():
    digits, images = torch.arange(40) % 10, torch.arange(110) % 10
    chosen = match_digits(digits, images, 0)
    assert torch.equal(digits[chosen], images)
    assert torch.equal(chosen, match_digits(digits, images, 0))
    assert not torch.equal(chosen, match_digits(digits, images, 1))
    uses = torch.bincount(chosen, minlength=40)  # 11 images and 4 digits of each class
    assert sorted(uses[digits == 7].tolist()) == [2, 3, 3, 3]


def test_training_and_test_pairs_are_independent(temp_cache):
    small_sets(600, 300)
    order = [match_digits(torch.arange(300) % 10, torch.arange(150) % 10, 0, part) for part in (0, 1)]
    assert not torch.equal(*order)


def test_a_class_without_digits_is_refused():
    with pytest.raises(ValueError, match="no digit 3"):
        match_digits(torch.tensor([1, 2]), torch.tensor([1, 3]), 0)


@pytest.mark.parametrize("missing", ["mnist", "cifar10"])
def test_a_missing_data_set_is_named(temp_cache, missing):
    small_sets()
    (temp_cache / f"{missing}.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=f"featureflock data get {missing}"):
        Dominoes().load()


def test_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="pairs_seed"):
        Dominoes(pairs_seed=-1)


def test_stacked_normalisations_apply_to_their_halves():
    upper, lower = Normalisation((1.0, 2.0), (2.0, 4.0)), Normalisation((10.0, 20.0), (5.0, 8.0))
    x = torch.randn(3, 2, 6, 5)
    assert_close(upper.above(lower)(x), torch.cat([upper(x[:, :, :3]), lower(x[:, :, 3:])], dim=2))
    assert_close(upper.above(lower)(upper.above(lower).mean_input((2, 6, 5))[None]), torch.zeros(1, 2, 6, 5))


def test_a_normalisation_of_another_size_is_refused():
    with pytest.raises(ValueError, match="4 numbers does not fit"):
        Normalisation((1.0,) * 4, (1.0,) * 4)(torch.zeros(1, 2, 5, 5))
