"""results/: files are collected, and tables written, with the right signs and marks."""

import importlib
import json
from pathlib import Path

import pytest

from featureflock.evaluation.metrics.registry import Metric
from featureflock.evaluation.statistics import PairedDifference

ROOT = Path(__file__).parents[2]


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "results"))
    return importlib.import_module


def test_differences_vs_further_baselines_are_paired_by_seed(module):
    """Ours minus the baseline's; with two seeds the half-width is 12.7062 · |d₀ − d₁| / 2."""
    values = {"Deep Ensembles": (0.70, 0.71), "a": (0.60, 0.64), "b": (0.63, 0.65)}
    runs = [
        {"title": title, "seed": seed, "numbers": {"accuracy": value, "other": 0.0}}
        for title, of in values.items()
        for seed, value in enumerate(of)
    ]
    against = module("collect").study({"rows": [{"ours": {"accuracy": {}}}], "runs": runs}, ["a", "b"])["against"]
    assert {title: list(rows) for title, rows in against.items()} == {"a": ["b"], "b": []}
    assert against["a"]["b"].keys() == {"accuracy"}
    difference = against["a"]["b"]["accuracy"]
    assert difference["mean"] == pytest.approx(0.02)
    assert difference["high"] == pytest.approx(0.02 + 12.7062 * 0.01, rel=1e-4)


@pytest.mark.parametrize(
    ("better", "low", "high", "seeds", "mark"),
    [
        ("lower", 0.1, 0.3, 3, " ▼"),
        ("higher", 0.1, 0.3, 3, " ▲"),
        ("lower", -0.3, -0.1, 3, " ▲"),
        ("lower", -0.1, 0.1, 3, ""),
        ("lower", 0.1, 0.3, 2, ""),
        ("", 0.1, 0.3, 3, ""),
    ],
)
def test_only_significant_differences_of_three_seeds_are_marked(module, better, low, high, seeds, mark):
    metric = Metric("nll", "NLL", better, "fixed:2", lambda run: None)
    difference = {"mean": (low + high) / 2, "low": low, "high": high, "seeds": seeds}
    text = module("render").difference_text(metric, difference)
    assert text.endswith("]" + mark)
    mean = metric.text((low + high) / 2, sign=True)
    assert text.startswith(mean + " [")
    assert module("render").significance_mark(metric, difference) == mark


def test_best_means_are_bold_in_the_direction_of_the_metric(module):
    groups = [{"nll": {"mean": value, "sd": 0.1}} for value in (0.304, 0.299, 0.301)]
    lower = module("render")._means(groups, [Metric("nll", "NLL", "lower", "fixed:2", lambda run: None)])
    assert [cell.startswith("**") for (cell,) in lower] == [True, True, True]  # equal as printed
    finer = module("render")._means(groups, [Metric("nll", "NLL", "higher", "fixed:3", lambda run: None)])
    assert [cell.startswith("**") for (cell,) in finer] == [True, False, False]


def test_the_table_of_other_libraries_marks_where_ours_is_behind(module):
    def row(name, by_round, met):
        return {"name": name, "value": sorted(by_round)[len(by_round) // 2], "by_round": by_round, "met": met}

    rows = [
        row("MLP: time per step, relative to A", [0.5, 0.7, 0.4], True),
        row("MLP: time per step, relative to B", [1.5], False),
        row("MLP: peak memory, relative to B", [0.9], True),
    ]
    run = {"rows": rows, "clock": "cpu", "threads": 1, "load_before": 7.25, "machine": {"processor": "a CPU"}}
    lines = module("render_benchmarks").peer_speed(run).splitlines()
    assert lines[0] == "| featureflock | relative to A | relative to B |"
    assert lines[2] == "| MLP: time per step | 0.50 × [0.40, 0.70] | **1.50 ×** |"
    assert lines[3] == "| MLP: peak memory | – | 0.90 × |"
    assert lines[-1] == "Behind in 1 of 3, in bold. Rounds: 3; CPU time; a CPU, 1 thread; load 7.2 before."


def test_a_choice_gives_up_neither_accuracy_nor_any_endpoint_if_it_can(module):
    """Lower error rates are gains; the largest mean gain decides only between candidates that give up as little."""
    study = module("repulsion_study")
    baseline = dict.fromkeys(study.PAPER, 0.5)

    def choice(*candidates):
        others = [
            {"values": {"name": name}, "diverged": False, "seeds": {"100": baseline | changed}}
            for name, changed in candidates
        ]
        first = [{"values": {}, "diverged": False, "seeds": {"100": baseline}}]
        methods = [{"method": "Deep Ensembles", "candidates": first}, {"method": "ours", "candidates": others}]
        return study.chosen(methods)["ours"]

    inaccurate = ("inaccurate", {"accuracy": 0.498, "ece": 0.1})  # gains: (−0.004 + 0.8) / 8
    accurate = ("accurate", {"accuracy": 0.4995, "ece": 0.4})
    best = ("best", {"nll": 0.49})
    assert choice(inaccurate, ("worse", {"accuracy": 0.49, "ece": 0.2}))["name"] == "inaccurate"
    assert choice(inaccurate, accurate)["name"] == "accurate"
    assert choice(inaccurate, accurate, best) == {"name": "best", "gain": pytest.approx(0.02 / 8)}


def strength_results(gains, unfinished=()):
    """Results of the curve: Deep Ensembles have accuracies by seed, feature-WGD those plus the gains of its row."""
    deep_ensembles = {0: 0.50, 1: 0.53, 2: 0.51}
    runs = []
    for (tau, network, members), of in gains.items():
        for seed, accuracy in deep_ensembles.items():
            for method, gain in (("Deep Ensembles", 0.0), (f"τ = {tau}", of[seed])):
                run = {"title": f"{method}, {network} × {members}", "members": members, "seed": seed}
                runs.append(run | {"numbers": {"accuracy": accuracy + gain, "not tabulated": 1.0}})
    runs = [run for run in runs if (run["title"], run["seed"]) not in unfinished]
    return {"rows": [{"ours": {"accuracy": {}}}], "runs": runs, "test_examples": 10_000, "corrupted_examples": 1_000}


def test_the_curve_over_the_repulsion_is_averaged_over_networks_then_over_seeds(module):
    """Means by seed: 0.01, 0.03, 0.02, half-width 4.3027 · 0.01 / √3; of 5 members 0.01 each, so no interval."""
    gains = {
        (3, "MLP 8", 10): (0.00, 0.06, 0.04),
        (3, "MLP 16", 10): (0.02, 0.00, 0.00),
        (3, "MLP 8", 5): (0.02, 0.01, 0.00),
        (3, "MLP 16", 5): (0.00, 0.01, 0.02),
    }
    lines = module("render_repulsion").repulsion_curve(strength_results(gains)).splitlines()
    assert lines[2:4] == ["| τ = 3 × 5 | +1.00 |", "| τ = 3 × 10 | +2.00 [−0.48, 4.48] |"]
    assert "mean over 2 networks and 3 seeds, on 10,000 test examples and 1,000 of each" in lines[-1]


def test_only_seeds_that_every_row_has_are_in_the_curve(module):
    gains = {(3, "MLP 8", 10): (0.01, 0.02, 0.5), (5, "MLP 8", 10): (0.03, 0.04, 0.5)}
    results = strength_results(gains, unfinished=[("τ = 5, MLP 8 × 10", 2)])
    lines = module("render_repulsion").repulsion_curve(results).splitlines()
    assert [line.partition(" [")[0] for line in lines[2:4]] == ["| τ = 3 × 10 | +1.50", "| τ = 5 × 10 | +3.50"]
    assert "and 2 seeds" in lines[-1]


def test_whether_gains_grow_with_the_width_is_tested_by_seed(module):
    """The last row is widest minus narrowest: 0.01, 0.02, 0.03, half-width 4.3027 · 0.01 / √3."""
    gains = {
        (10, "MLP 8", 10): (0.01, 0.02, 0.03),
        (10, "MLP 16", 10): (0.09, 0.09, 0.09),
        (10, "MLP 32", 10): (0.02, 0.04, 0.06),
        (10, "MLP 32", 5): (0.50, 0.50, 0.50),
        (5, "MLP 32", 10): (0.50, 0.50, 0.50),
    }
    lines = module("render_repulsion").gains_by_width(strength_results(gains)).splitlines()
    assert [line.split(" |")[0] for line in lines[2:5]] == ["| MLP 8", "| MLP 16", "| MLP 32"]
    assert lines[3] == "| MLP 16 | +9.00 |"
    assert lines[5] == "| MLP 32 minus MLP 8 | +2.00 [−0.48, 4.48] |"
    assert "τ = 10 × 10 minus Deep Ensembles × 10, mean over 3 seeds" in lines[-1]


def test_the_best_of_a_search_are_bold_among_candidates_with_as_many_seeds(module):
    candidates = [
        {"values": {"tau": tau}, "seeds": {str(100 + k): {"nll": nll} for k, nll in enumerate(of)}}
        for tau, of in ((1.0, (0.5, 0.7)), (2.0, (0.5, 0.6)), (3.0, (0.4,)), (4.0, (0.3,)))
    ]
    lines = module("render").tuning({"methods": [{"by": "nll", "candidates": candidates}]}).splitlines()
    assert [line.count("**") // 2 for line in lines[2:]] == [0, 1, 0, 1]
    assert lines[3].startswith("| 2 | 2 | **0.5500 ±")


def test_runs_that_the_results_have_are_not_trained_again(module, monkeypatch, tmp_path):
    study = module("repulsion_study")
    runs = study.study_runs(study.STUDIES["repulsion-fashion-mnist-cnn"], "laptop", tmp_path, 2)
    known = [
        {"title": "of another study", "folder": run.folder.name, "members": run.size}
        for run in runs
        if run.recipe.seed == 1 or run.row.title == "Deep Ensembles × 5"
    ]
    (tmp_path / "repulsion_another.json").write_text(json.dumps({"runs": known}))
    monkeypatch.setattr(study, "FOLDER", tmp_path)
    trained = []
    monkeypatch.setattr(study, "train_and_predict", lambda run, *rest: trained.append((run.row.title, run.recipe.seed)))

    def train(*titles, shard=study.Shard(), seeds=2, first_seed=0):
        trained.clear()
        study.train_missing("repulsion-fashion-mnist-cnn", tmp_path, titles, shard, seeds, first_seed)
        return list(trained)

    everything = train()
    assert ("Single", 0) in everything
    assert ("Deep Ensembles × 10", 0) in everything
    assert all(seed == 0 for _, seed in everything)
    assert ("Deep Ensembles × 5", 0) not in everything
    assert train("Single", "Deep Ensembles × 5") == [("Single", 0)]
    assert train("Single", seeds=2, first_seed=1) == [("Single", 2)]
    assert sorted(train(shard=study.Shard(1, 2)) + train(shard=study.Shard(2, 2))) == sorted(everything)
    with pytest.raises(SystemExit, match="has no row 'Nobody'"):
        train("Nobody")


@pytest.mark.parametrize(
    ("low", "high", "expected", "verdict"),
    [
        (0.001, 0.003, "higher", "supported"),
        (0.001, 0.003, "lower", "contradicted"),
        (-0.003, -0.001, "higher", "contradicted"),
        (-0.003, -0.001, "lower", "supported"),
        (-0.001, 0.003, "higher", "undecided"),
        (0.001, 0.0019, "equal", "supported"),
        (0.001, 0.0021, "equal", "undecided"),
        (0.0021, 0.003, "equal", "contradicted"),
        (-0.003, -0.0021, "equal", "contradicted"),
        (None, None, "equal", "undecided"),
    ],
)
def test_an_interval_on_the_side_that_the_paper_claims_supports_it(module, low, high, expected, verdict):
    difference = PairedDifference(0.0, low, high, 3)
    assert module("claims").verdict(difference, expected, margin=0.002) == verdict


def test_better_is_higher_for_accuracies_and_lower_for_the_rest(module):
    claims = module("claims")
    assert {key for key, side in claims.BETTER.items() if side == "higher"} == {"accuracy", "corrupted_accuracy"}
    assert all({claims.BETTER[key], claims.WORSE[key]} == {"higher", "lower"} for key in claims.BETTER)


def test_gains_of_two_sizes_are_compared_by_seed(module, monkeypatch, tmp_path):
    """(a − b) − (c − d) is 0.01, 0.02, 0.03 for the seeds that all four rows have."""
    claims = module("claims")
    values = {"a": (0.30, 0.30, 0.30, 0.9), "b": (0.1, 0.1, 0.1), "c": (0.29, 0.28, 0.27), "d": (0.1, 0.1, 0.1)}
    runs = [
        {"title": title, "seed": seed, "numbers": {"nll": value}}
        for title, of in values.items()
        for seed, value in enumerate(of)
    ]
    (tmp_path / "sizes.json").write_text(json.dumps({"runs": runs}))
    monkeypatch.setattr(claims, "FOLDER", tmp_path)
    comparison = claims.Comparison("more members", "sizes", ("a", "d"), ("b", "c"))
    monkeypatch.setattr(claims, "CLAIMS", (claims.Claim("NLL gains grow", {"nll": "lower"}, (comparison,)),))
    results = claims.measure()
    ((difference,),) = ([of["differences"]["nll"] for of in claim["comparisons"]] for claim in results["claims"])
    assert difference["mean"] == pytest.approx(0.02)
    assert difference["low"] == pytest.approx(0.02 - 4.3027 * 0.01 / 3**0.5, rel=1e-4)
    assert (difference["seeds"], difference["verdict"]) == (3, "undecided")
    assert "| NLL gains grow | more members | +0.0200 [−0.0048, 0.0448] |" in module("render_repulsion").claims(results)
    difference["verdict"] = "contradicted"
    assert "0.0448] ✗ |" in module("render_repulsion").claims(results)


def test_the_leading_table_has_means_and_marks(module):
    keys = module("render").COMPARISON
    gain, loss, level = (
        {"mean": mean, "low": mean - 0.001, "high": mean + 0.001, "seeds": 5, "p_holm": p}
        for mean, p in ((-0.02, 0.01), (0.02, 0.01), (0.02, 0.06))
    )
    differences = dict.fromkeys(keys, level) | {"nll": gain, "brier": loss}
    entry = {"setting": "somewhere", "seeds": 5, "differences": differences}
    line = module("render_repulsion").headline({"settings": [entry]}).splitlines()[2]
    cells = dict(zip(keys, line.strip("| ").split(" | ")[2:], strict=True))
    assert (cells["accuracy"], cells["nll"], cells["brier"]) == ("+2.00", "−0.0200 ▲", "+0.0200 ▼")


def test_summaries_are_those_of_the_results(module):
    claims, study = module("claims"), module("repulsion_study")
    assert json.loads((claims.FOLDER / "claims.json").read_text()) == claims.measure()
    assert json.loads(study.results_file("repulsion-headline").read_text()) == study.headline()
