"""tune: candidates within a budget, successive halving over seeds, held-out examples only, any data and model."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import featureflock as ff
from featureflock.data import CustomData, DataSet, Digits, HeldOut, Splits
from featureflock.evaluation.metrics.registry import find_metric
from featureflock.methods import ADP, DeepEnsembles, FeatureMAP, FeatureWGD, WeightWGD
from featureflock.models import CustomModelConfig, MLPConfig
from featureflock.studies import tune
from featureflock.studies.search_space import count_candidates, default_space, draw_candidates, rounds, with_values
from featureflock.studies.tuning import FIRST_SEED, Candidate, rank, reliable_metric
from featureflock.training import Recipe

QUICK = Recipe(Digits(), MLPConfig((16, 8)), members=2, epochs=1, subset=100)
SPACE = {"method.repulsion": (1.0, 5.0, 25.0), "method.prior.precision": (1e-4, 1e-3, 1e-2)}

# ---- candidates


def test_a_budget_is_divided_by_three_from_round_to_round():
    assert rounds(75, 20, 3) == [13, 5, 2]
    assert rounds(75, 20, 1) == [20]
    assert rounds(6, 20, 3) == [6, 6, 6]  # everything fits: a plain grid
    for points in (1, 7, 30, 200):
        for budget in range(3, 60, 7):
            for seeds in (1, 2, 3):
                counts = rounds(points, budget, seeds)
                assert sum(counts) <= budget
                assert len(counts) == seeds
                assert counts == sorted(counts, reverse=True)
                assert counts[-1] >= 1
                assert counts[0] <= points
    for budget, seeds in ((2, 3), (5, 0)):
        with pytest.raises(ValueError, match="budget at least seeds"):
            rounds(9, budget, seeds)


def test_candidates_are_different_start_with_the_recipe_and_cover_all_values():
    own = {"method.repulsion": 1.0, "method.prior.precision": 1e-3}
    every = draw_candidates(QUICK, SPACE, 100)
    assert every[0] == own
    assert len(every) == 9
    drawn = draw_candidates(QUICK, SPACE, 6)
    assert drawn[0] == own
    assert len(drawn) == 6
    assert all(point in every for point in drawn)
    assert all(drawn.count(point) == 1 for point in drawn)
    for field, values in SPACE.items():
        assert {point[field] for point in drawn} == set(values)
    assert draw_candidates(QUICK, SPACE, 6) == drawn


def test_a_large_space_is_counted_and_not_listed():
    space = {f"method.{name}": tuple(k / 1000 for k in range(1, 1001)) for name in ("repulsion", "prior.precision")}
    assert count_candidates(QUICK, space) == 10**6  # with the recipe's own repulsion of 1 and precision of 1e-3
    assert count_candidates(replace(QUICK, method=FeatureWGD(repulsion=7.0)), space) == 10**6 + 1
    drawn = draw_candidates(QUICK, space, 5)
    assert len({tuple(point.values()) for point in drawn}) == 5
    assert rounds(10**6, 20, 3) == [13, 5, 2]


def test_fields_of_components_are_replaced():
    changed = with_values(QUICK, {"method.prior.precision": 0.5, "learning-rate": 0.3})
    assert changed == replace(QUICK, method=FeatureWGD(ff.Cauchy(0.5)), learning_rate=0.3)
    with pytest.raises(ValueError, match=r"method\.repulsoin.*did you mean repulsion"):
        with_values(QUICK, {"method.repulsoin": 2.0})
    with pytest.raises(ValueError, match=r"no field 'epochs\.size' to tune"):
        with_values(QUICK, {"epochs.size": 2})
    with pytest.raises(ValueError, match="no values for epochs"):
        draw_candidates(QUICK, {"epochs": ()}, 3)


def test_every_method_has_something_to_tune():
    space = default_space(replace(QUICK, members=5))
    assert {1.0, 5.0, 10.0} < set(space["method.repulsion"])
    assert space["method.rank"] == (1, 2, 5)  # at most the number of members
    assert "method.prior.precision" not in default_space(replace(QUICK, method=FeatureWGD(ff.Uniform())))
    assert set(default_space(replace(QUICK, method=ADP()))) == {"method.alpha", "method.beta"}
    assert set(default_space(replace(QUICK, method=FeatureMAP()))) == {"method.prior.precision"}
    independent = default_space(replace(QUICK, method=DeepEnsembles(), learning_rate=0.1, weight_decay=1e-3))
    assert independent["learning_rate"] == pytest.approx((0.025, 0.05, 0.1, 0.2, 0.4))
    assert independent["weight_decay"] == pytest.approx((1e-4, 3e-4, 1e-3, 3e-3, 1e-2))
    assert default_space(replace(QUICK, method=DeepEnsembles(), weight_decay=0.0))["weight_decay"] == (0.0,)


# ---- choice


def candidate(name: str, diverged: bool = False, at_bound: bool = False, **means: float) -> Candidate:
    result = SimpleNamespace(summary=means, temperature_at_bound=lambda key: at_bound)
    return Candidate({"name": name}, QUICK, {} if diverged else {100: result}, diverged)  # type: ignore[dict-item]


def names(candidates: list[Candidate]) -> list[str]:
    return [each.values["name"] for each in candidates]


def test_the_best_mean_comes_first_and_diverged_candidates_last():
    a, b = candidate("a", accuracy=0.9, nll=0.5), candidate("b", accuracy=0.8, nll=0.4)
    gone = candidate("gone", diverged=True)
    assert names(rank([gone, a, b], find_metric("nll"))) == ["b", "a", "gone"]
    assert names(rank([gone, b, a], find_metric("accuracy"))) == ["a", "b", "gone"]
    assert names(rank([a, b], find_metric("nll"), accuracy_tolerance=0.05)) == ["a", "b"]
    assert names(rank([a, b], find_metric("nll"), accuracy_tolerance=0.11)) == ["b", "a"]
    with pytest.raises(ValueError, match="corrupted_nll has no value"):
        rank([a, b], find_metric("corrupted_nll"))


def test_a_temperature_at_its_bound_makes_the_uncalibrated_metric_decide():
    results = [next(iter(candidate("a", at_bound=bound).results.values())) for bound in (False, True)]
    metric, note = reliable_metric(results, find_metric("nll"))
    assert metric.key == "raw_nll"
    assert "1 of 2 runs is at its bound" in note
    assert reliable_metric(results[:1], find_metric("nll")) == (find_metric("nll"), "")
    assert reliable_metric(results, find_metric("accuracy")) == (find_metric("accuracy"), "")


# ---- searches


@dataclass(frozen=True)
class Untouchable(DataSet):
    """Its test set must not be read."""

    def load(self) -> Splits:
        return replace(Digits().load(), test=None)  # type: ignore[arg-type]


def test_a_search_halves_its_candidates_and_never_reads_the_test_set(tmp_path):
    recipe = replace(QUICK, data=Untouchable())
    lines: list[str] = []
    tuning = tune(recipe, tmp_path, space=SPACE, budget=7, seeds=2, held_out=100, log=lines.append)
    assert [len(each.results) for each in tuning.candidates] == [2, 2, 1, 1, 1]
    assert len(list(tmp_path.iterdir())) == 7
    assert tuning.best.data == Untouchable()
    assert tuning.best == with_values(recipe, tuning.candidates[0].values)
    key, ours = tuning.metric.key, tuning.candidates
    assert ours[0].mean(key).mean <= ours[1].mean(key).mean
    first_round = [each.results[FIRST_SEED].summary[key] for each in ours]
    assert sorted(first_round[:2]) == sorted(first_round)[:2]  # the best two of the first round were continued
    lines.clear()
    again = tune(recipe, tmp_path, space=SPACE, budget=7, seeds=2, held_out=100, log=lines.append)
    assert again.to_json() == tuning.to_json()
    assert not any(str(tmp_path) in line for line in lines)  # nothing was trained


def test_each_seed_holds_out_other_examples(tmp_path):
    tuning = tune(QUICK, tmp_path, space={"epochs": (1,)}, budget=2, seeds=2, held_out=100)
    results = tuning.candidates[0].results
    assert sorted(results) == [FIRST_SEED, FIRST_SEED + 1]
    seeds = [(r.recipe["data"]["seed"], r.recipe["split_seed"], r.recipe["seed"]) for r in results.values()]
    assert seeds == [(100, 100, 100), (101, 101, 101)]
    other = tune(replace(QUICK, seed=7), tmp_path, space={"epochs": (1,)}, budget=1, seeds=1, held_out=100)
    assert list(other.candidates[0].results) == [107]
    assert other.best.seed == 7
    with pytest.raises(ValueError, match="leave split_seed at 0"):
        tune(replace(QUICK, split_seed=1), tmp_path, held_out=100)


def test_custom_data_and_a_model_that_cannot_be_rebuilt_from_json(tmp_path):
    x, y = Digits().load().train.x.float().flatten(1) / 16, Digits().load().train.labels
    width = 12

    def make() -> nn.Module:
        network = nn.Sequential(nn.Linear(64, width), nn.ReLU())
        network.feature_dim = width
        return network

    data = CustomData((x[:300], y[:300]), (x[300:320], y[300:320]))
    recipe = Recipe(data, CustomModelConfig(make), members=2, epochs=8, learning_rate=0.1)
    tuning = tune(recipe, tmp_path, space={"method.repulsion": (1.0, 5.0)}, budget=2, seeds=1, by="raw_nll")
    assert [len(each.results) for each in tuning.candidates] == [1, 1]
    summaries = [next(iter(each.results.values())).summary for each in tuning.candidates]
    assert summaries[0]["raw_nll"] <= summaries[1]["raw_nll"]
    assert summaries[0]["accuracy"] > 0.3  # 60 held-out digits, so the trained weights were evaluated
    assert tuning.best.data is data
    with pytest.raises(ValueError, match="cannot be sent to other processes"):
        tune(recipe, tmp_path / "b", space={"method.repulsion": (1.0, 5.0)}, budget=2, seeds=1, workers=2)


def test_a_candidate_that_diverges_is_not_chosen(tmp_path):
    recipe = replace(QUICK, method=DeepEnsembles(), nesterov=True)
    space = {"learning_rate": (0.05, 1e20)}
    tuning = tune(recipe, tmp_path, space=space, budget=3, seeds=1, held_out=100)
    assert [each.diverged for each in tuning.candidates] == [False, False, True]
    assert tuning.candidates[-1].values == {"learning_rate": 1e20}
    assert tune(recipe, tmp_path, space=space, budget=3, seeds=1, held_out=100).to_json() == tuning.to_json()
    with pytest.raises(ValueError, match="Every candidate of Deep Ensembles diverged"):
        tune(replace(recipe, learning_rate=1e20), tmp_path, space={"learning_rate": (1e20,)}, budget=1, seeds=1)


def test_a_value_at_the_end_of_its_range_is_noted(tmp_path):
    space = {"learning_rate": (1e-6, 1e-5, 0.05)}
    recipe = replace(QUICK, learning_rate=0.05)
    tuning = tune(recipe, tmp_path, space=space, budget=3, seeds=1, held_out=100, by="raw_nll")
    assert tuning.notes == ["The best learning_rate is the largest one tried; try values beyond it."]


def test_a_part_of_the_held_out_examples_is_corrupted(tmp_path):
    space = {"method.repulsion": (1.0,)}
    by = {"space": space, "budget": 1, "seeds": 1, "held_out": 100}
    (clean,) = tune(QUICK, tmp_path, **by, by="raw_nll").candidates
    assert "corrupted_nll" not in clean.results[100].summary
    (both,) = tune(QUICK, tmp_path, **by, by="raw_nll", corrupted_examples=20).candidates
    result = both.results[100]
    assert "corrupted_nll" in result.summary
    assert result.clean.examples == 100
    assert {scores.examples for sets in result.corrupted.values() for scores in sets.values()} == {20}


def test_weight_wgd_can_be_tuned(tmp_path):
    """Its ensembles are built for the number of training examples that remain."""
    recipe = replace(QUICK, method=WeightWGD(), subset=None)
    assert tune(recipe, tmp_path, space={"method.repulsion": (1.0,)}, budget=1, seeds=1, held_out=1100).best == recipe


# ---- held-out data


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


def test_held_out_examples_are_validation_examples_where_the_data_have_them():
    whole, divided = Digits(views=2).load(), HeldOut(Digits(views=2), 200).load()
    assert torch.equal(divided.train.x, whole.train.x)
    validation = {row.numpy().tobytes() for row in whole.validation.x}
    assert {row.numpy().tobytes() for row in divided.test.x} <= validation
    with pytest.raises(ValueError, match="validation must be 0 to 500"):
        HeldOut(Digits(views=2), 501).load()


@pytest.mark.parametrize("examples", [0, 1200, -1])
def test_examples_must_remain_on_both_sides(examples):
    with pytest.raises(ValueError, match=str(examples)):
        HeldOut(Digits(), examples).load()
