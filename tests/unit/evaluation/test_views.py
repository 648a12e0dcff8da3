"""Views: dominoes, inputs with one view left, which view drives a member, and what a report says of it."""

import json
import math
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from helpers.made_evaluations import make_images, make_results
from torch.testing import assert_close

from featureflock.cli.reproduce import main as reproduce
from featureflock.cli.train import main as train
from featureflock.data import (
    CustomData,
    Digits,
    Dominoes,
    Normalisation,
    Splits,
    TensorExamples,
    View,
    only_view,
    two_view_digits,
)
from featureflock.data.sets.dominoes import match_digits
from featureflock.data.sources.cache import store
from featureflock.evaluation import (
    EvaluationProtocol,
    covered_views,
    evaluate_runs,
    first_view_fraction,
    test_sets,
    view_difference_by_input,
    view_difference_on_average,
)
from featureflock.report import write_report

LEFT, RIGHT = Digits(views=2).load().views


def small_sets(digits: int = 30, pictures: int = 20) -> None:
    """Collections of a few pictures in the cache: digit c has the byte 10 c + 5, picture k the byte k."""
    for name, count, shape in (("mnist", digits, (28, 28, 1)), ("cifar10", pictures, (32, 32, 3))):
        raw = {}
        for part, size in (("train", count), ("test", count // 2)):
            labels = (np.arange(size) % 10).astype(np.uint8)
            byte = 10 * labels + 5 if name == "mnist" else np.arange(size).astype(np.uint8)
            raw[f"{part}_x"] = np.broadcast_to(byte[:, None, None, None], (size, *shape)).copy()
            raw[f"{part}_y"] = labels
        store(name, raw, source="made for a test", published=False)


# ---- dominoes


def test_a_domino_is_a_digit_above_a_picture_of_its_class(temp_cache):
    small_sets()
    splits = Dominoes().load()
    for part, size in ((splits.train, 20), (splits.test, 10)):
        assert part.shape == (3, 64, 32)
        assert len(part) == size
        for k in range(size):
            digit = part.x[k, :, 2:30, 2:30]
            assert bool((digit == 10 * int(part.labels[k]) + 5).all())
            assert bool((part.x[k, :, 32:] == k).all())  # each picture once, in its order
        margin = part.x[:, :, :32].clone()
        margin[:, :, 2:30, 2:30] = 0
        assert int(margin.sum()) == 0
    assert splits.class_names[3] == "3 cat"


def test_pairs_are_drawn_by_the_seed_and_use_every_digit_before_one_again():
    digits, pictures = torch.arange(40) % 10, torch.arange(110) % 10
    chosen = match_digits(digits, pictures, 0)
    assert torch.equal(digits[chosen], pictures)
    assert torch.equal(chosen, match_digits(digits, pictures, 0))
    assert not torch.equal(chosen, match_digits(digits, pictures, 1))
    uses = torch.bincount(chosen, minlength=40)  # 11 pictures a class, 4 digits
    assert sorted(uses[digits == 7].tolist()) == [2, 3, 3, 3]


def test_pairs_of_training_and_test_are_drawn_apart(temp_cache):
    small_sets(600, 300)
    order = [match_digits(torch.arange(300) % 10, torch.arange(150) % 10, 0, part) for part in (0, 1)]
    assert not torch.equal(*order)


def test_a_class_without_digits_is_refused():
    with pytest.raises(ValueError, match="no digit 3"):
        match_digits(torch.tensor([1, 2]), torch.tensor([1, 3]), 0)


@pytest.mark.parametrize(("there", "missing"), [("cifar10", "mnist"), ("mnist", "cifar10")])
def test_what_is_missing_is_named(temp_cache, there, missing):
    small_sets()
    (temp_cache / f"{missing}.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=f"featureflock data get {missing}"):
        Dominoes().load()


def test_a_bad_seed_of_pairs_gets_a_sentence():
    with pytest.raises(ValueError, match="pairs_seed"):
        Dominoes(pairs_seed=-1)


# ---- scales of parts, and blank views


def test_a_scale_of_two_parts_is_two_scales():
    upper, lower = Normalisation((1.0, 2.0), (2.0, 4.0)), Normalisation((10.0, 20.0), (5.0, 8.0))
    x = torch.randn(3, 2, 6, 5)
    assert_close(upper.above(lower)(x), torch.cat([upper(x[:, :, :3]), lower(x[:, :, 3:])], dim=2))
    assert_close(upper.above(lower)(upper.above(lower).mean_input((2, 6, 5))[None]), torch.zeros(1, 2, 6, 5))


def test_a_scale_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="4 numbers does not fit"):
        Normalisation((1.0,) * 4, (1.0,) * 4)(torch.zeros(1, 2, 5, 5))


def test_only_one_view_is_left_and_the_rest_is_the_mean():
    normalisation = Normalisation((100.6,), (10.0,))
    x = torch.randint(0, 256, (4, 1, 8, 16), dtype=torch.uint8)
    left = only_view(TensorExamples(x, torch.arange(4), normalisation=normalisation), LEFT)
    assert torch.equal(left.x[..., :8], x[..., :8])
    assert bool((left.x[..., 8:] == 101).all())
    floats = only_view(TensorExamples(x.float(), torch.arange(4), normalisation=normalisation), RIGHT)
    seen = next(iter(floats.batches([torch.arange(4)], torch.device("cpu")))).x
    assert_close(seen[..., :8], torch.zeros(4, 1, 8, 8), atol=1e-5, rtol=0)
    assert bool((only_view(TensorExamples(x.float(), torch.arange(4)), RIGHT).x[..., :8] == 0).all())


def test_digits_with_one_view_are_those_of_the_demo():
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


# ---- measures


def logs(*rows):
    """One member, an input for each row."""
    return torch.tensor([rows], dtype=torch.float64).log()


def test_share_by_hand():
    """Input 1 loses log 3 without the first view and log 1.5 without the second; input 2 the first only; input 3 none;
    input 4 gains by the loss of the first, which counts as none."""
    whole = logs([0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.6, 0.4])
    only_second = logs([0.3, 0.7], [0.6, 0.4], [0.6, 0.4], [0.9, 0.1])
    only_first = logs([0.6, 0.4], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7])
    share = first_view_fraction(whole, only_first, only_second)
    hand = math.log(3) / (math.log(3) + math.log(1.5))
    assert_close(share, torch.tensor([[hand, 1.0, 0.5, 0.0]], dtype=torch.float64), atol=3e-6, rtol=0)
    assert_close(first_view_fraction(whole, only_second, only_first), 1 - share)


def test_share_is_of_the_class_predicted_on_the_whole():
    whole, only_second = logs([0.1, 0.9]), logs([0.8, 0.2])
    share = first_view_fraction(whole, logs([0.4, 0.6]), only_second)
    assert float(share) == pytest.approx(math.log(4.5) / (math.log(4.5) + math.log(1.5)))


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
    share = torch.rand(4, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pairs = [(i, j) for i in range(4) for j in range(i)]
    by_input = sum(float((share[i] - share[j]).abs().mean()) for i, j in pairs) / 6
    on_average = sum(abs(float(share[i].mean() - share[j].mean())) for i, j in pairs) / 6
    assert view_difference_by_input(share) == pytest.approx(by_input)
    assert view_difference_on_average(share) == pytest.approx(on_average)
    assert on_average <= by_input


def test_a_view_is_covered_by_a_member_that_can_do_without_the_other():
    """10 classes: of 0.9 a member must keep 0.1 + 0.8 / 2 = 0.5."""
    assert covered_views([0.9, 0.9], [[0.51, 0.2], [0.1, 0.49]], 10) == [True, False]
    assert covered_views([0.9, 0.9], [[0.8, 0.2], [0.2, 0.8]], 10) == [True, True]
    assert covered_views([0.1], [[0.1], [0.1]], 10) == [False, False]  # knows nothing, so keeps nothing


def test_predictions_on_other_inputs_are_refused():
    with pytest.raises(ValueError, match="the same inputs"):
        first_view_fraction(logs([0.5, 0.5]), logs([0.5, 0.5], [0.5, 0.5]), logs([0.5, 0.5]))


# ---- from a run to a page


def test_from_training_to_a_report(tmp_path, monkeypatch, temp_cache):
    """A run on two-view digits: what is in the summary is what the functions give; the figure has a dot a member."""
    monkeypatch.chdir(tmp_path)
    flags = ["--members", "3", "--epochs", "2", "--subset", "200"]
    for method in ("deep-ensembles", "feature-wgd"):
        train(["two-view-digits", "--method", method, "--out", method, *flags])
    protocol = EvaluationProtocol(examples=100, corruptions=(), ood=(), maps=0)
    found = evaluate_runs(["deep-ensembles", "feature-wgd"], protocol)
    assert [s.name for s in found.results.test_sets] == ["clean", "left", "right"]
    views, summary = found.results.runs[0].views, found.results.runs[0].summary
    members = views.only["left"].member_accuracy
    assert summary["only_left_member_accuracy"] == pytest.approx(sum(members) / 3)
    assert summary["only_left_best_member_accuracy"] == max(members)
    assert summary["left_share"] == pytest.approx(sum(views.member_share) / 3)
    assert summary["view_difference_on_average"] <= summary["view_difference_by_input"]
    assert (tmp_path / "deep-ensembles" / "predictions" / "only-left.safetensors").is_file()
    page = write_report(found.results, found.images, tmp_path / "report").read_text()
    assert "Which view members use" in page
    assert "difference by input" in page
    picture = ElementTree.parse(tmp_path / "report" / "figures" / "views.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert len(picture.findall(f".//{space}circle")) == 2 * 3
    labels = [each.get("aria-label") for each in picture.iter(f"{space}svg") if each.get("aria-label")]
    assert len(labels) == 2
    assert "with only the left" in labels[0]
    assert "prefers-color-scheme: dark" in picture.find(f"{space}style").text


def test_reports_without_views_have_no_such_section(tmp_path):
    results = make_results()
    page = write_report(results, make_images(results), tmp_path / "report").read_text()
    assert "Which view members use" not in page
    assert not (tmp_path / "report" / "figures" / "views.svg").exists()


def test_dominoes_train_by_name_and_are_tested_by_view(tmp_path, monkeypatch, temp_cache):
    small_sets(60, 60)
    monkeypatch.chdir(tmp_path)
    train(
        ["two-view-digits", "--data", "dominoes", "--members", "2", "--epochs", "1", "--subset", "40", "--out", "run"]
    )
    found = evaluate_runs(["run"], EvaluationProtocol(corruptions=(), ood=(), maps=0))
    assert [s.name for s in found.results.test_sets] == ["clean", "digit", "image"]
    assert "digit_share" in found.results.runs[0].summary


@pytest.mark.parametrize("study", ["two-views", "dominoes"])
def test_the_studies_run(study, tmp_path):
    reproduce([study, "--seeds", "1", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "smoke" / f"{study}.json").read_text())["rows"]
    assert [row["title"] for row in rows][2] == "feature-MAP, shared head"
    assert "view_difference_on_average" in rows[0]["ours"]
    assert rows[0]["ours"]["view_difference_by_input"]["mean"] == 0  # a single network
    assert rows[3]["ours"]["view_difference_by_input"]["mean"] > 0
    assert "| difference by input |" in (tmp_path / "smoke" / f"{study}.md").read_text()
