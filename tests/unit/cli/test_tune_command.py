"""Tuning: the test set stays unseen, and the best on held-out examples is chosen."""

import json
from dataclasses import dataclass, replace

import pytest
import torch

from featureflock.cli.tune import Search, candidates, choose, main
from featureflock.data import DataSet, Digits, HeldOut, Splits
from featureflock.studies import reproduce
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
def test_there_must_be_something_to_train_and_to_choose_by(examples):
    with pytest.raises(ValueError, match=str(examples)):
        HeldOut(Digits(), examples).load()


@dataclass(frozen=True)
class Untouchable(DataSet):
    """Its test set must not be read."""

    def load(self) -> Splits:
        splits = Digits().load()
        return replace(splits, test=None)  # type: ignore[arg-type]


def test_the_test_set_is_never_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr("featureflock.data.Untouchable", Untouchable, raising=False)
    recipe = replace(RECIPES["digits-cnn"].recipe, data=Untouchable(), members=2, epochs=1, subset=100)
    study, _ = candidates(recipe, Search(precisions=(1e-3,), held_out=100))
    results = reproduce(study, "paper", tmp_path, seeds=1).results
    assert results is not None
    assert results["test_examples"] == 100


def test_candidates_are_all_pairs():
    study, tried = candidates(RECIPES["digits-cnn"].recipe, Search(precisions=(1e-3, 1e-1), ranks=(1, 2)))
    methods = [row.recipe.method for row in study.rows]
    assert [(m.prior.precision, m.rank) for m in methods] == [(1e-3, 1), (1e-3, 2), (1e-1, 1), (1e-1, 2)]
    assert tried["precision 0.1, rank 2"] == {"precision": 0.1, "rank": 2}
    assert all(row.recipe.data == HeldOut(Digits(), 5_000, 0) for row in study.rows)


@pytest.mark.parametrize(("by", "best"), [("nll", "b"), ("accuracy", "a"), ("ece", "a"), ("corrupted_accuracy", "b")])
def test_the_best_is_lowest_or_highest(by, best):
    numbers = {
        "a": {"accuracy": 0.9, "nll": 0.5, "ece": 0.1, "corrupted_accuracy": 0.4},
        "b": {"accuracy": 0.8, "nll": 0.4, "ece": 0.2, "corrupted_accuracy": 0.5},
    }
    rows = [{"title": t, "ours": {k: {"mean": v} for k, v in found.items()}} for t, found in numbers.items()]
    assert choose(rows, by) == best


def test_the_command_says_what_to_train(tmp_path, capsys):
    args = [*QUICK, "--precisions", "1e-3", "1", "--ranks", "1", "--out", str(tmp_path)]
    main(args)
    printed = " ".join(capsys.readouterr().out.split())
    kept = json.loads((tmp_path / "tune-digits-cnn.json").read_text())
    best = choose(kept["rows"], "nll")
    precision = best.split()[1].rstrip(",")
    assert f"Best by nll on held-out examples: {best}." in printed
    assert "it may be worth trying further" in printed
    command = f"featureflock train digits-cnn --members 2 --epochs 1 --subset 100 --method.prior.precision {precision}"
    assert f"{command} --method.rank 1" in printed
    main(args)
    assert "0 runs to train" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["digit"], "digits"),
        (["--ranks", "3"], "which recipe first"),
        ([*QUICK, "--method", "deep-ensembles"], "no prior precision"),
        ([*QUICK, "--method.prior", "uniform"], "no prior precision"),
        ([*QUICK, "--method", "deep-ensembles", "--precisions", "--ranks", "3"], "no rank"),
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


def test_deep_ensembles_are_measured_on_the_same_examples_and_never_chosen(tmp_path, capsys):
    main([*QUICK, "--precisions", "1e3", "--reference", "--out", str(tmp_path)])
    ours, theirs = json.loads((tmp_path / "tune-digits-cnn.json").read_text())["rows"]
    assert (ours["title"], theirs["title"]) == ("precision 1000", "Deep Ensembles")
    difference = ours["ours"]["nll"]["mean"] - theirs["ours"]["nll"]["mean"]
    assert difference > 0
    assert ours["differences"]["nll"]["mean"] == pytest.approx(difference)
    assert "Best by nll on held-out examples: precision 1000." in capsys.readouterr().out
