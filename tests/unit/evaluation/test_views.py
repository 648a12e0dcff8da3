"""Views: inputs with one view left, and which view drives each member."""

import math

import pytest
import torch
from helpers.made_evaluations import make_images, make_results
from torch.testing import assert_close

from featureflock.data import (
    CustomData,
    Digits,
    Normalisation,
    Splits,
    TensorExamples,
    View,
    only_view,
    two_view_digits,
)
from featureflock.evaluation import EvaluationProtocol, test_sets
from featureflock.evaluation.views import (
    covered_views,
    first_view_fraction,
    view_difference_by_input,
    view_difference_on_average,
)
from featureflock.reports import write_report

LEFT, RIGHT = Digits(views=2).load().views


# ---- inputs with one view left


def test_everything_but_one_view_is_the_mean_input():
    normalisation = Normalisation((100.6,), (10.0,))
    x = torch.randint(0, 256, (4, 1, 8, 16), dtype=torch.uint8)
    left = only_view(TensorExamples(x, torch.arange(4), normalisation=normalisation), LEFT)
    assert torch.equal(left.x[..., :8], x[..., :8])
    assert bool((left.x[..., 8:] == 101).all())
    floats = only_view(TensorExamples(x.float(), torch.arange(4), normalisation=normalisation), RIGHT)
    seen = next(iter(floats.batches([torch.arange(4)], torch.device("cpu")))).x
    assert_close(seen[..., :8], torch.zeros(4, 1, 8, 8), atol=1e-5, rtol=0)
    assert bool((only_view(TensorExamples(x.float(), torch.arange(4)), RIGHT).x[..., :8] == 0).all())


def test_two_view_digits_with_one_view_left():
    splits, pairs = Digits(views=2).load(), two_view_digits()
    for test_set, name in zip(test_sets.single_views(splits), ("right blank", "left blank"), strict=True):
        examples = test_set.load(test_set.positions)
        assert_close(examples.x[:, 0].float() / 16, pairs.x_test[name])
        assert torch.equal(examples.labels, pairs.y_test)


def test_test_sets_of_views_are_distinct():
    splits = Digits(views=2).load()
    left, right = test_sets.single_views(splits, EvaluationProtocol(examples=50))
    assert (left.name, left.label, right.label, len(left.positions)) == ("only-left", "left", "right", 50)
    assert left.kind == right.kind == "view"
    assert left.identity != right.identity
    assert torch.equal(left.positions, test_sets.clean(splits, EvaluationProtocol(examples=50)).positions)
    assert not list(test_sets.single_views(Digits().load()))


def test_views_of_inputs_that_are_not_images_are_refused():
    flat = CustomData((torch.randn(8, 4), torch.arange(8)), (torch.randn(8, 4), torch.arange(8))).load()
    with pytest.raises(ValueError, match="parts of images"):
        list(test_sets.single_views(Splits(flat.train, flat.test, 8, views=(View("a", slice(0, 1), slice(0, 1)),))))


# ---- which view drives a member


def logs(*rows):
    """One member, an input for each row."""
    return torch.tensor([rows], dtype=torch.float64).log()


def test_fraction_of_known_predictions():
    """Input 1 loses log 3 without the first view and log 1.5 without the second; input 2 the first only; input 3 none;
    input 4 gains by the loss of the first, which counts as none."""
    full = logs([0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.6, 0.4])
    only_second = logs([0.3, 0.7], [0.6, 0.4], [0.6, 0.4], [0.9, 0.1])
    only_first = logs([0.6, 0.4], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7])
    fraction = first_view_fraction(full, only_first, only_second)
    hand = math.log(3) / (math.log(3) + math.log(1.5))
    assert_close(fraction, torch.tensor([[hand, 1.0, 0.5, 0.0]], dtype=torch.float64), atol=3e-6, rtol=0)
    assert_close(first_view_fraction(full, only_second, only_first), 1 - fraction)


def test_fraction_refers_to_the_class_predicted_on_the_full_input():
    full, only_second = logs([0.1, 0.9]), logs([0.8, 0.2])
    fraction = first_view_fraction(full, logs([0.4, 0.6]), only_second)
    assert float(fraction) == pytest.approx(math.log(4.5) / (math.log(4.5) + math.log(1.5)))


def test_differences_by_input_and_on_average_by_hand():
    """Two members that swap their views from input to input differ on each, and not at all on average."""
    swapping = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]])
    assert view_difference_by_input(swapping) == 1
    assert view_difference_on_average(swapping) == 0
    specialists = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.5, 0.5]])  # pairs differ by 1, ½ and ½
    assert view_difference_by_input(specialists) == pytest.approx(2 / 3)
    assert view_difference_on_average(specialists) == pytest.approx(2 / 3)
    assert view_difference_by_input(torch.ones(1, 3)) == view_difference_on_average(torch.ones(1, 3)) == 0


def test_differences_are_those_of_a_loop_over_pairs():
    fraction = torch.rand(4, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pairs = [(i, j) for i in range(4) for j in range(i)]
    by_input = sum(float((fraction[i] - fraction[j]).abs().mean()) for i, j in pairs) / 6
    on_average = sum(abs(float(fraction[i].mean() - fraction[j].mean())) for i, j in pairs) / 6
    assert view_difference_by_input(fraction) == pytest.approx(by_input)
    assert view_difference_on_average(fraction) == pytest.approx(on_average)
    assert on_average <= by_input


def test_a_view_is_covered_by_a_member_that_can_do_without_the_other():
    """10 classes: of 0.9 a member must retain 0.1 + 0.8 / 2 = 0.5."""
    assert covered_views([0.9, 0.9], [[0.51, 0.2], [0.1, 0.49]], 10) == [True, False]
    assert covered_views([0.9, 0.9], [[0.8, 0.2], [0.2, 0.8]], 10) == [True, True]
    assert covered_views([0.1], [[0.1], [0.1]], 10) == [False, False]  # at chance level, so nothing to retain


def test_predictions_on_other_inputs_are_refused():
    with pytest.raises(ValueError, match="the same inputs"):
        first_view_fraction(logs([0.5, 0.5]), logs([0.5, 0.5], [0.5, 0.5]), logs([0.5, 0.5]))


# ---- in reports


def test_reports_on_data_without_views_have_no_section_on_views(tmp_path):
    results = make_results()
    page = write_report(results, make_images(results), tmp_path / "report").read_text()
    assert "Which view members use" not in page
    assert not (tmp_path / "report" / "figures" / "views.svg").exists()
