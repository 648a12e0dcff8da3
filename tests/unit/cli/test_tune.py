"""tune: the test set is not used, and the best candidate on held-out examples is chosen by a metric to rely on."""

import json
from dataclasses import dataclass, replace

import pytest
import torch

from featureflock.cli.tune import Search, choose, main, make_study, reliable_metric
from featureflock.data import DATA_SETS, DataSet, Digits, HeldOut, Splits
from featureflock.evaluation.metrics.registry import find_metric
from featureflock.studies import run_study
from featureflock.training import RECIPES

QUICK = ["digits-cnn", "--members", "2", "--epochs", "1", "--subset", "100", "--held-out", "50"]


def test_held_out_examples_are_of_the_training_set_and_not_trained_on():
    whole, divided = Digits().load(), HeldOut(Digits(), 200).load()
    assert (len(divided.train), len(divided.test), divided.validation) == (1000, 200, None)
    rows = {row.numpy().tobytes() for row in whole.train.x}
    held, rest = ({row.numpy().tobytes() for row in part.x} for part in (divided.test, divided.train))
    assert held <= rows
    assert not held & rest
    assert torch.bincount(divided.test.labels).tolist() == [20] * 10
    other = HeldOut(Digits(), 200, seed=1).load()
    assert not torch.equal(other.test.x, divided.test.x)


@pytest.mark.parametrize("examples", [0, 1200, -1])
def test_examples_must_remain_on_both_sides(examples):
    with pytest.raises(ValueError, match=str(examples)):
        HeldOut(Digits(), examples).load()


@dataclass(frozen=True)
class Untouchable(DataSet):
    """Its test set must not be read."""

    def load(self) -> Splits:
        splits = Digits().load()
        return replace(splits, test=None)  # type: ignore[arg-type]


def test_the_test_set_is_never_read(tmp_path, monkeypatch):
    monkeypatch.setitem(DATA_SETS, "untouchable", Untouchable)
    recipe = replace(RECIPES["digits-cnn"].recipe, data=Untouchable(), members=2, epochs=1, subset=100)
    study, _ = make_study(recipe, Search(precisions=(1e-3,), held_out=100))
    results = run_study(study, "paper", tmp_path, seeds=1).results
    assert results is not None
    assert results["test_examples"] == 100


def test_candidates_are_all_pairs():
    study, candidates = make_study(RECIPES["digits-cnn"].recipe, Search(precisions=(1e-3, 1e-1), ranks=(1, 2)))
    methods = [row.recipe.method for row in study.rows]
    assert [(m.prior.precision, m.rank) for m in methods] == [(1e-3, 1), (1e-3, 2), (1e-1, 1), (1e-1, 2)]
    assert candidates["precision 0.1, rank 2"] == {"precision": 0.1, "rank": 2}
    assert all(row.recipe.data == HeldOut(Digits(), 5_000, 0) for row in study.rows)
    study, candidates = make_study(RECIPES["digits-cnn"].recipe, Search(precisions=(1e-3,), repulsions=(1.0, 5.0)))
    assert [row.recipe.method.repulsion for row in study.rows] == [1, 5]
    assert candidates["precision 0.001, repulsion 5"] == {"precision": 1e-3, "repulsion": 5}


def test_candidates_that_differ_in_the_eighth_digit_are_told_apart():
    _, candidates = make_study(RECIPES["digits-cnn"].recipe, Search(precisions=(0.12345678, 0.12345679, 1e-3)))
    assert list(candidates) == ["precision 0.12345678", "precision 0.12345679", "precision 0.001"]


@pytest.mark.parametrize(("by", "best"), [("nll", "b"), ("accuracy", "a"), ("ece", "a"), ("corrupted_accuracy", "b")])
def test_the_best_is_lowest_or_highest(by, best):
    numbers = {
        "a": {"accuracy": 0.9, "nll": 0.5, "ece": 0.1, "corrupted_accuracy": 0.4},
        "b": {"accuracy": 0.8, "nll": 0.4, "ece": 0.2, "corrupted_accuracy": 0.5},
    }
    rows = [{"title": t, "ours": {k: {"mean": v} for k, v in found.items()}} for t, found in numbers.items()]
    assert choose(rows, find_metric(by)) == best


def test_a_temperature_at_its_bound_makes_the_uncalibrated_metric_decide():
    """a is best after temperature scaling, b before; the temperature of one of them is at its bound."""
    numbers = {"a": {"nll": 0.1, "raw_nll": 0.9, "accuracy": 0.8}, "b": {"nll": 0.2, "raw_nll": 0.5, "accuracy": 0.7}}
    rows = [
        {"title": title, "ours": {key: {"mean": value} for key, value in found.items()}, "at_bound": []}
        for title, found in numbers.items()
    ]
    nll = find_metric("nll")
    assert reliable_metric(rows, nll) == (nll, "")
    assert choose(rows, nll) == "a"
    rows[0]["at_bound"] = ["nll", "brier", "ece"]
    metric, note = reliable_metric(rows, nll)
    assert metric.key == "raw_nll"
    assert "1 of 2 candidates is at its bound" in note
    assert choose(rows, metric) == "b"
    assert reliable_metric(rows, find_metric("accuracy")) == (find_metric("accuracy"), "")
    rows[1]["at_bound"] = ["nll_at_severity_3"]
    assert reliable_metric(rows, find_metric("nll_at_severity_3"))[0].key == "raw_corrupted_nll"


def test_the_command_finds_temperatures_at_their_bound(tmp_path, capsys):
    """Ten held-out examples that are classified without errors: the ranking is by raw NLL, and a sentence says so."""
    small = ["digits", "--members", "2", "--epochs", "20", "--subset", "400", "--held-out", "10"]
    main([*small, "--precisions", "1e-3", "1e-2", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "tune-digits.json").read_text())["rows"]
    assert all(row["ours"]["accuracy"]["mean"] == 1 for row in rows)
    assert [row["at_bound"] for row in rows] == [["nll", "brier", "ece"]] * 2
    best = min(rows, key=lambda row: row["ours"]["raw_nll"]["mean"])["title"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "so nll after temperature scaling is not reliable; candidates are ranked by raw_nll instead." in printed
    assert f"Best by raw_nll on the held-out examples: {best}." in printed


def test_the_command_prints_how_to_train_the_best(tmp_path, capsys):
    args = [*QUICK, "--precisions", "1e-3", "1", "--ranks", "1", "--repulsions", "2", "--out", str(tmp_path)]
    main(args)
    printed = " ".join(capsys.readouterr().out.split())
    results = json.loads((tmp_path / "tune-digits-cnn.json").read_text())
    metric, _ = reliable_metric(results["rows"], find_metric("nll"))
    best = choose(results["rows"], metric)
    precision = best.split()[1].rstrip(",")
    assert f"Best by {metric.key} on the held-out examples: {best}." in printed
    assert "try values beyond it" in printed
    command = f"featureflock train digits-cnn --members 2 --epochs 1 --subset 100 --method.prior.precision {precision}"
    assert f"{command} --method.rank 1 --method.repulsion 2" in printed
    main(args)
    assert "0 runs to train" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["digit"], "digits"),
        (["--ranks", "3"], "recipe comes first"),
        ([*QUICK, "--by", "nil"], "did you mean nll"),
        ([*QUICK, "--by", "auroc_{}"], "in place of {}, as in auroc_noise"),
        ([*QUICK, "--by", "disagreement"], "cannot rank candidates; choose one of mean_iou, accuracy, nll"),
        ([*QUICK, "--method", "deep-ensembles"], "no prior precision"),
        ([*QUICK, "--method.prior", "uniform"], "no prior precision"),
        ([*QUICK, "--method", "deep-ensembles", "--precisions", "--ranks", "3"], "no rank"),
        ([*QUICK, "--method", "adp", "--precisions", "--repulsions", "3"], "no repulsion"),
        ([*QUICK, "--seeds", "0"], "at least 1"),
        (["digits-cnn", "--held-out", "1200"], "0 to 1199"),
        ([*QUICK, "--shard", "3/2"], "such as 3/8"),
        ([*QUICK, "--precisions", "-1"], "precision"),
    ],
)
def test_mistakes_get_one_sentence(args, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        main([*args, "--out", str(tmp_path / "tuning")])
    assert not list(tmp_path.rglob("*.json"))


def test_deep_ensembles_are_evaluated_on_the_same_examples_and_never_chosen(tmp_path, capsys):
    main([*QUICK, "--precisions", "1e3", "--reference", "--out", str(tmp_path)])
    ours, theirs = json.loads((tmp_path / "tune-digits-cnn.json").read_text())["rows"]
    assert (ours["title"], theirs["title"]) == ("precision 1000", "Deep Ensembles")
    difference = ours["ours"]["nll"]["mean"] - theirs["ours"]["nll"]["mean"]
    assert difference > 0
    assert ours["differences"]["nll"]["mean"] == pytest.approx(difference)
    assert "on the held-out examples: precision 1000." in capsys.readouterr().out
