"""Studies: their rows at each scale, the paper's numbers, and results over shared runs."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy import stats

import featureflock as ff
from featureflock.cli.reproduce import main
from featureflock.core.priors import Cauchy
from featureflock.evaluation.endpoints import CLEAN
from featureflock.evaluation.statistics import holm
from featureflock.methods import DeepEnsembles, FeatureMAP, FeatureWGD
from featureflock.reports.page import build_sections, render_page
from featureflock.reports.tables import beside_paper
from featureflock.studies import STUDIES, Row, Study, repulsion, run_study, study_runs
from featureflock.studies.costs import cost, estimate_flops, gpu_time
from featureflock.studies.study import PAPER
from featureflock.training import RECIPES, train
from featureflock.training.run_folder import RunFolder

SCALES = ("smoke", "laptop", "paper")
SMALL = Study(
    "Two methods",
    tuple(Row(m.title, replace(RECIPES["cifar10-wrn16x4"].recipe, method=m)) for m in (DeepEnsembles(), FeatureWGD())),
    CLEAN,
    seeds=2,
)
NEED_PAIRS = ("disagreement", "map_similarity", "corrupted_map_similarity")


@pytest.fixture(scope="module")
def shared_runs(tmp_path_factory) -> Path:
    """One folder for all studies, which share runs."""
    return tmp_path_factory.mktemp("studies")


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("scale", SCALES)
def test_rows_differ_at_every_scale(name, scale, tmp_path):
    study = STUDIES[name]
    rows = study.rows_at(scale)
    runs = [(run.folder, run.size) for run in study_runs(study, scale, tmp_path)]
    assert len(set(runs)) == len(runs) == len(rows) * study.seeds_at(scale)
    assert len(rows) > 1
    if scale == "paper":
        assert [row for row, _ in rows] == list(study.rows)


def test_paper_scale_has_the_papers_recipes():
    study = STUDIES["cifar10"]
    assert [row.title for row in study.rows] == [
        "Single",
        "Deep Ensembles",
        "weight-WGD",
        "function-WGD",
        "feature-WGD",
    ]
    base = RECIPES["cifar10-wrn16x4"].recipe.to_json()
    for row in study.rows:
        differing = {key for key, value in row.recipe.to_json().items() if base[key] != value}
        assert differing <= {"method", "members"}, row.title
    assert [row.recipe.method.rank for row in STUDIES["rank"].rows] == [3, 5, 10, None]
    assert [row.recipe.model.width for row in STUDIES["width"].rows] == [2, 2, 4, 4, 8, 8]
    seeds = {name: study.seeds for name, study in STUDIES.items()}
    assert (seeds["imagenet"], seeds["width"], seeds["rank"], seeds["cifar100"]) == (1, 3, 3, 5)


@pytest.mark.parametrize(
    ("study", "row", "column", "number"),
    [
        ("cifar10", "feature-WGD", "corrupted_nll", "0.681"),
        ("cifar100", "Deep Ensembles", "accuracy", "82.3 ± 0.2"),
        ("imagenet", "feature-WGD", "corrupted_accuracy", "42.4"),
        ("adp-dice", "DICE, WRN-28-2 × 3", "accuracy", "80.6 ± 0.1"),
        ("priors", "Uniform", "ece", "0.020"),
        ("feature-map", "feature-MAP", "nll", "0.883"),
        ("width", "feature-WGD, width 8", "accuracy", "84.1"),
        ("rank", "r = 10 of 10", "accuracy", "82.7"),
    ],
)
def test_the_papers_numbers(study, row, column, number):
    assert next(r for r in STUDIES[study].rows if r.title == row).paper[column] == number


def test_training_costs_count_the_flops_of_the_convolutions():
    """The convolutions of WRN-16-4, stage by stage; a backward pass takes twice as much."""
    one = replace(RECIPES["cifar10-wrn16x4"].recipe, method=DeepEnsembles(), members=1, epochs=1, subset=1)
    ten = RECIPES["cifar10-wrn16x4"].recipe
    assert estimate_flops(ten) == pytest.approx(estimate_flops(one) * 10 * 300 * 50_000)
    multiplications = 32**2 * 9 * 3 * 16
    for size, inputs, outputs in ((32, 16, 64), (16, 64, 128), (8, 128, 256)):
        multiplications += size**2 * (
            9 * inputs * outputs + 3 * 9 * outputs**2 + inputs * outputs
        )  # the last: the shortcut
    assert estimate_flops(one) == 3 * 2 * multiplications
    assert estimate_flops(RECIPES["digits"].recipe) == 0


def test_a_run_that_another_worker_is_training_is_skipped(tmp_path):
    runs = study_runs(SMALL, "smoke", tmp_path)
    with RunFolder(runs[1].folder).locked():
        status = run_study(SMALL, "smoke", tmp_path)
    assert [run.folder for run in status.unfinished] == [runs[1].folder]
    assert status.results is None
    assert run_study(SMALL, "smoke", tmp_path).results is not None


def test_the_command_prints_our_numbers_next_to_the_papers(tmp_path, capsys):
    main(["feature-map", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert re.search(r"feature-MAP +1 +\d+\.\d+ ±\d", printed)
    assert "0.883" in printed
    out = tmp_path / "smoke"
    results = json.loads((out / "feature-map.json").read_text())
    assert results["rows"][1]["paper"]["nll"] == "0.883"
    assert results["rows"][1]["ours"]["accuracy"]["seeds"] == 2
    written = (out / "feature-map.md").read_text()
    assert "| paper |  | 77.6 | 0.883 |" in written
    assert "Ours at smoke scale, the paper's at full scale." in written
    for run in results["runs"]:
        lines = (out / run["folder"] / "metrics.jsonl").read_text().splitlines()
        assert run["train_accuracy"] == json.loads(lines[-1])["accuracy"] / 100
        assert run["seconds"] > 0
    assert "<html" in (out / "feature-map" / "report.html").read_text()
    main(["feature-map", "--out", str(tmp_path)])
    assert "0 runs to train" in capsys.readouterr().out


def test_several_studies_by_one_command(tmp_path, capsys, monkeypatch):
    """Their total cost is printed first, and runs that they share are trained once."""
    chosen = {name: STUDIES[name] for name in ("feature-map", "priors", "rank")}
    monkeypatch.setattr("featureflock.cli.reproduce.STUDIES", chosen)
    main(["all", "--seeds", "1", "--out", str(tmp_path)])
    printed = " ".join(capsys.readouterr().out.split())
    runs = {run.folder for study in chosen.values() for run in study_runs(study, "smoke", tmp_path / "smoke", 1)}
    assert len(runs) < sum(len(study.rows) for study in chosen.values())
    assert f"3 studies; {len(runs)} runs to train." in printed
    assert all(folder.is_dir() for folder in runs)
    assert all((tmp_path / "smoke" / name / "report.html").is_file() for name in chosen)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_runs_at_the_smallest_scale(name, shared_runs):
    """Its rows have all metrics of its columns, each within its range."""
    study = STUDIES[name]
    status = run_study(study, "smoke", shared_runs, seeds=1)
    assert status.results is not None
    rows = status.results["rows"]
    assert [row["title"] for row in rows] == [row.title for row, _ in study.rows_at("smoke")]
    for row in rows:
        expected_keys = {column for column in study.columns if row["members"] > 1 or column not in NEED_PAIRS}
        expected_keys -= {column for column in expected_keys if column[-1] in "234"}  # smoke tests severities 1 and 5
        if name == "dominoes":  # two-view digits at this scale, whose views have other names
            expected_keys -= {column for column in expected_keys if "digit" in column or "image" in column}
        assert row["ours"].keys() == expected_keys
        for key, value in row["ours"].items():
            assert 0 <= value["mean"] <= (20 if "nll" in key else 2 if key == "covered_views" else 1)
    has_maps = any("map" in column for column in study.columns)
    for evaluation in status.evaluations:
        assert (evaluation.results.cam_figure is not None) == has_maps


def test_smaller_deep_ensembles_are_sub_ensembles_of_the_largest(tmp_path):
    """They are not trained: their members equal those of a smaller ensemble that is."""
    study = STUDIES["ensemble-size"]
    runs = [r for r in study_runs(study, "smoke", tmp_path, 1) if isinstance(r.recipe.method, DeepEnsembles)]
    assert [run.size for run in runs] == [2, 4]
    assert len({run.folder for run in runs}) == 1
    largest = runs[-1].recipe
    small = replace(largest, members=2)
    train(largest, tmp_path / "four")
    train(small, tmp_path / "two")
    four, two = (ff.load(tmp_path / name / "ensemble") for name in ("four", "two"))
    for i in range(2):
        ours, theirs = two.extractors[i].state_dict(), four.extractors[i].state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_differences_are_paired_by_seed_with_deep_ensembles_of_the_same_size(tmp_path):
    status = run_study(STUDIES["ensemble-size"], "smoke", tmp_path)
    rows, runs = status.results["rows"], status.results["runs"]
    ours = {run["seed"]: run["numbers"]["nll"] for run in runs if run["title"] == "feature-WGD" and run["members"] == 4}
    theirs = {run["seed"]: run["numbers"]["nll"] for run in runs if run["title"] == "Deep Ensembles"}
    row = next(row for row in rows if row["title"] == "feature-WGD" and row["members"] == 4)
    expected = [ours[seed] - theirs[seed] for seed in (0, 1)]
    assert row["differences"]["nll"]["mean"] == pytest.approx(sum(expected) / 2)
    half = 12.7062 * abs(expected[0] - expected[1]) / 2  # Student's t with one degree of freedom; s/√2 = |a − b|/2
    assert row["differences"]["nll"]["high"] == pytest.approx(sum(expected) / 2 + half, rel=1e-4)
    small = next(row for row in rows if row["title"] == "feature-WGD" and row["members"] == 2)
    part = next(row for row in rows if row["title"] == "Deep Ensembles" and row["members"] == 2)
    difference = small["ours"]["nll"]["mean"] - part["ours"]["nll"]["mean"]
    assert small["differences"]["nll"]["mean"] == pytest.approx(difference)


def test_pages_show_the_titles_of_the_rows(shared_runs):
    """Where these tell the rows apart: "feature-WGD" with four sizes gets what differs instead."""
    (evaluation,) = run_study(STUDIES["text-vs-code"], "smoke", shared_runs, seeds=1).evaluations
    assert [group.title for group in evaluation.results.groups][:3] == [
        "Deep Ensembles",
        "no repulsion",
        "dominant, median",
    ]
    (evaluation,) = run_study(STUDIES["ensemble-size"], "smoke", shared_runs, seeds=1).evaluations
    titles = [group.title for group in evaluation.results.groups]
    assert "feature-WGD (members 2)" in titles
    assert len(set(titles)) == len(titles)


def test_scores_by_severity_are_means_over_corruptions(shared_runs):
    status = run_study(STUDIES["severity"], "smoke", shared_runs, seeds=1)
    run = status.evaluations[0].results.runs[0]
    for severity in ("1", "5"):
        sets = [by[severity].calibrated["accuracy"] for by in run.corrupted.values()]
        assert len(sets) == 2
        assert run.summary[f"accuracy_at_severity_{severity}"] == pytest.approx(sum(sets) / 2)


def test_rows_still_differ_at_laptop_scale():
    ranks = [recipe.method.rank for _, recipe in STUDIES["rank"].rows_at("laptop")]
    assert ranks == [1, 2, 5, None]
    widths = [recipe.model.widths[-1] for _, recipe in STUDIES["width"].rows_at("laptop")]
    assert widths == [32, 32, 64, 64, 128, 128]
    sizes = [recipe.size for _, recipe in STUDIES["ensemble-size"].rows_at("laptop")]
    assert sizes == [1, 2, 5, 10] * 2


def test_at_laptop_scale_other_data_become_cifar10_and_share_its_runs(tmp_path):
    shared = {run.folder for run in study_runs(STUDIES["cifar10"], "laptop", tmp_path)}
    for name in ("cifar100", "imagenet", "severity", "cam-similarity"):
        assert {run.folder for run in study_runs(STUDIES[name], "laptop", tmp_path)} <= shared
    for name in ("severity", "cam-similarity"):
        titles = [row.title for row, _ in STUDIES[name].rows_at("laptop")]
        assert titles == ["Deep Ensembles, CIFAR-10", "feature-WGD, CIFAR-10"]


def test_the_list_and_the_cost(capsys):
    main(["--list"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in STUDIES)
    assert re.search(r"imagenet +Table 3 +ResNet-50 × 5 on ImageNet, clean and corrupted +6, 9, 3 +\d+ days", printed)
    sources = re.findall(r"(Tables? \d+|Figures? \d+)", printed)
    assert sources[:3] == ["Table 1", "Table 2", "Table 3"]
    assert sources[-1] == "Figure 4"
    paper = [RECIPES["cifar10-wrn16x4"].recipe] * 5
    assert "FLOPs" in cost(paper)
    assert gpu_time(paper) == f"{5 * estimate_flops(paper[0]) / (0.3 * 312e12) / 3600:.0f} hours"
    assert "seconds" in cost([RECIPES["digits"].recipe])
    assert gpu_time([RECIPES["digits"].recipe]) == "minutes"


# ---- seeds


def test_seeds_may_start_at_another_number(tmp_path):
    runs = study_runs(SMALL, "smoke", tmp_path, 2, 100)
    assert [run.recipe.seed for run in runs] == [100, 100, 101, 101]
    assert all(run.recipe.split_seed == 0 for run in runs)
    status = run_study(SMALL, "smoke", tmp_path, seeds=2, first_seed=100)
    assert [run["seed"] for run in status.results["runs"]] == [100, 100, 101, 101]
    assert status.results["rows"][1]["differences"]["nll"]["seeds"] == 2


def test_the_command_takes_the_first_seed(tmp_path, capsys):
    main(["feature-map", "--seeds", "1", "--first-seed", "7", "--out", str(tmp_path)])
    assert "feature-MAP, seed 7" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--first-seed must be at least 0; got -1"):
        main(["feature-map", "--first-seed", "-1", "--out", str(tmp_path)])


def test_seeds_with_new_subsets_are_one_row_and_paired_by_seed(tmp_path):
    study = replace(SMALL, new_subsets=True, endpoints=("nll", "accuracy"))
    runs = study_runs(study, "smoke", tmp_path, 3)
    assert [(run.recipe.seed, run.recipe.split_seed) for run in runs[::2]] == [(0, 0), (1, 1), (2, 2)]
    assert runs[0].folder == study_runs(SMALL, "smoke", tmp_path)[0].folder  # seed 0 has subset 0 in either case
    subsets = [run.recipe.splits().train.indices for run in runs[::2]]
    assert not torch.equal(subsets[0], subsets[1])
    status = run_study(study, "smoke", tmp_path, seeds=3)
    (evaluation,) = status.evaluations
    assert [group.seeds for group in evaluation.results.groups] == [[0, 1, 2]] * 2
    page = evaluation.results.groups[1]
    assert page.baseline_differs_in == []
    row = status.results["rows"][1]
    numbers = {(run["title"], run["seed"]): run["numbers"]["nll"] for run in status.results["runs"]}
    differences = [numbers["feature-WGD", seed] - numbers["Deep Ensembles", seed] for seed in range(3)]
    found = row["differences"]["nll"]
    assert found["mean"] == pytest.approx(sum(differences) / 3)
    assert found["p"] == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)
    assert page.differences["nll"]._asdict() == pytest.approx(found)
    p_values = [row["differences"][key]["p"] for key in study.endpoints]
    known = [1.0 if p is None else p for p in p_values]
    assert found["p_holm"] == pytest.approx(holm(known)[0])
    assert row["differences"]["brier"]["p_holm"] is None
    sections = build_sections(evaluation.results, evaluation.images)
    assert "Holm" in beside_paper(status.results).note
    assert "0, 1, 2" in render_page(evaluation.results, sections)  # the subsets of a row


def test_endpoints_must_be_columns():
    with pytest.raises(ValueError, match="endpoint corrected_nll is not among the columns"):
        replace(SMALL, endpoints=("corrected_nll",))


# ---- repulsion studies


def test_the_recipes_of_the_repulsion_study_on_cifar10():
    base = replace(RECIPES["cifar10-fast"].recipe, epochs=4, precision="bfloat16")
    study, tuned = STUDIES["repulsion-cifar10"], repulsion.TUNED_CIFAR10
    prior = Cauchy(tuned.precision)
    methods = [
        DeepEnsembles(),
        FeatureWGD(Cauchy(1e-3), repulsion=1.0),
        FeatureWGD(prior, repulsion=tuned.repulsion),
        FeatureMAP(prior),
    ]
    for scale in ("laptop", "paper"):
        assert [recipe for _, recipe in study.rows_at(scale)] == [replace(base, method=method) for method in methods]
        assert study.protocol(scale) == ff.evaluation.EvaluationProtocol(corrupted_examples=1000, ood=(), maps=500)
        assert study.seeds_at(scale) == 5
    assert {recipe.size for _, recipe in study.rows_at("paper")} == {5}
    runs = study_runs(study, "paper", Path())
    assert runs[0].folder.name == "deep-ensembles-ed539f49-seed0"  # the name of a run that exists
    assert runs[1].folder.name == "feature-wgd-74291ade-seed0"
    assert not study.new_subsets


def test_the_settings_of_the_protocol():
    cifar100 = STUDIES["repulsion-cifar100"].rows[1].recipe
    assert cifar100.model.widths == (32, 64, 256)
    assert (cifar100.method.prior, cifar100.method.repulsion) == (Cauchy(5e-3), 1.0)
    assert (cifar100.epochs, cifar100.batch, cifar100.precision) == (4, 128, "bfloat16")
    for name, epochs, features, others in (("mlp", 60, 512, 4), ("cnn", 20, 128, 0)):
        study = STUDIES[f"repulsion-fashion-mnist-{name}"]
        assert (study.seeds_at("laptop"), study.seeds_at("paper"), study.new_subsets) == (10, 10, True)
        for row in study.rows:
            recipe = row.recipe
            assert (recipe.epochs, recipe.batch, recipe.subset, recipe.precision) == (epochs, 128, 5_000, "bfloat16")
            assert recipe.model.extractor((1, 28, 28)).feature_dim == features
        assert sorted({row.recipe.size for row in study.rows}) == [1, 5, 10]
        assert len(study.rows) == 1 + 2 * 4 + others
    for name in ("cifar10", "cifar100", "fashion-mnist-mlp", "fashion-mnist-cnn"):
        assert STUDIES[f"repulsion-{name}"].endpoints == PAPER
    strength = STUDIES["repulsion-strength"]
    strengths = [getattr(row.recipe.method, "repulsion", 0.0) for row in strength.rows if "512-512 × 10" in row.title]
    assert strengths == [0.0, 0.0, 1, 2, 3, 5, 10, 20, 30]  # Deep Ensembles and feature-MAP first
    assert len({row.title for row in strength.rows}) == 2 * 3 * 9
    sizes = [row.recipe.size for row in STUDIES["repulsion-size"].rows]
    assert sizes == [1, 2, 3, 5, 10, 20] * 2


def test_torchrun_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--shard 1/8"):
        main(["cifar10", "--out", str(tmp_path)])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["cifar11"], "cifar10"),
        (["cifar10", "cifar11"], "cifar11"),
        ([], "such as cifar10, or all"),
        (["cifar10", "--shard", "9/8"], "such as 3/8"),
        (["cifar10", "--shard", "three"], "such as 3/8"),
        (["cifar10", "--seeds", "0"], "at least 1"),
    ],
)
def test_mistakes_get_one_sentence(args, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        main([*args, "--out", str(tmp_path)])
