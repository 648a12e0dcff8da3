"""Studies: what differs between rows, the paper's numbers, and workers that share a folder."""

import json
import multiprocessing
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import featureflock as ff
from featureflock.cli.reproduce import main
from featureflock.methods import DeepEnsembles, FeatureWGD
from featureflock.studies import STUDIES, Row, Shard, Study, reproduce, study_runs
from featureflock.studies.costs import cost, gpu_time, training_flop
from featureflock.studies.study import CLEAN
from featureflock.training import RECIPES, train
from featureflock.training.recipe import describe
from featureflock.training.run_folder import RunFolder

SCALES = ("smoke", "laptop", "paper")
SMALL = Study(
    "two ways",
    tuple(Row(m.title, replace(RECIPES["cifar10-wrn16x4"].recipe, method=m)) for m in (DeepEnsembles(), FeatureWGD())),
    CLEAN,
    seeds=2,
)
ABOUT_PAIRS = ("disagreement", "map_similarity", "corrupted_map_similarity")


@pytest.fixture(scope="module")
def shared_runs(tmp_path_factory) -> Path:
    """Studies have runs in common."""
    return tmp_path_factory.mktemp("studies")


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("scale", SCALES)
def test_rows_differ_at_every_scale(name, scale, tmp_path):
    study = STUDIES[name]
    rows = study.rows_at(scale)
    found = [(cell.folder, cell.size) for cell in study_runs(study, scale, tmp_path)]
    assert len(set(found)) == len(found) == len(rows) * study.seeds_at(scale)
    assert len(rows) > 1
    if scale == "paper":
        assert [row for row, _ in rows] == list(study.rows)


def test_the_paper_scale_is_the_paper():
    table = STUDIES["cifar10"]
    assert [row.title for row in table.rows] == [
        "Single",
        "Deep Ensembles",
        "weight-WGD",
        "function-WGD",
        "feature-WGD",
    ]
    base = describe(RECIPES["cifar10-wrn16x4"].recipe)
    for row in table.rows:
        differing = {key for key, value in describe(row.recipe).items() if base[key] != value}
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


def test_training_costs_are_those_of_the_products():
    """The convolutions of WRN-16-4, stage by stage; a backward pass takes twice as much."""
    one = replace(RECIPES["cifar10-wrn16x4"].recipe, method=DeepEnsembles(), members=1, epochs=1, subset=1)
    ten = RECIPES["cifar10-wrn16x4"].recipe
    assert training_flop(ten) == pytest.approx(training_flop(one) * 10 * 300 * 50_000)
    products = 32**2 * 9 * 3 * 16
    for size, inputs, outputs in ((32, 16, 64), (16, 64, 128), (8, 128, 256)):
        products += size**2 * (9 * inputs * outputs + 3 * 9 * outputs**2 + inputs * outputs)  # the last: the shortcut
    assert training_flop(one) == 3 * 2 * products
    assert training_flop(RECIPES["digits"].recipe) == 0


def work(folder: Path, shard: tuple[int, int], done) -> None:
    torch.set_num_threads(1)  # more of them, in three processes, would wait for each other
    outcome = reproduce(SMALL, "smoke", folder, shard=Shard(*shard))
    done.put((shard, None if outcome.results is None else outcome.results["rows"]))


def test_workers_share_a_folder_and_train_each_run_once(tmp_path):
    """Three workers, two of whom have the same number, all at once."""
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    shards = [(1, 2), (2, 2), (2, 2)]
    workers = [context.Process(target=work, args=(tmp_path, shard, done)) for shard in shards]
    for worker in workers:
        worker.start()
    outcomes = [done.get(timeout=500) for _ in workers]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    folders = [cell.folder for cell in study_runs(SMALL, "smoke", tmp_path)]
    assert len(folders) == 4
    for folder in folders:
        starts = json.loads((folder / "environment.json").read_text())
        assert len(starts) == 1, f"{folder} was trained {len(starts)} times"
    tables = [rows for _, rows in outcomes if rows is not None]
    assert tables, "the last worker makes the table"
    again = reproduce(SMALL, "smoke", tmp_path)
    assert again.results is not None
    assert again.left == []
    assert all(table == again.results["rows"] for table in tables)
    alone = context.Process(target=work, args=(tmp_path / "alone", (1, 1), done))
    alone.start()
    assert done.get(timeout=500)[1] == again.results["rows"]
    alone.join(60)


def test_a_cell_that_somebody_else_has_is_left_to_them(tmp_path):
    everything = study_runs(SMALL, "smoke", tmp_path)
    with RunFolder(everything[1].folder).locked():
        outcome = reproduce(SMALL, "smoke", tmp_path)
    assert [cell.folder for cell in outcome.left] == [everything[1].folder]
    assert outcome.results is None
    assert reproduce(SMALL, "smoke", tmp_path).results is not None


def test_the_command_prints_our_numbers_beside_the_papers(tmp_path, capsys):
    main(["feature-map", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert re.search(r"feature-MAP +1 +\d+\.\d+ ± \d", printed)
    assert "0.883" in printed
    out = tmp_path / "smoke"
    kept = json.loads((out / "feature-map.json").read_text())
    assert kept["rows"][1]["paper"]["nll"] == "0.883"
    assert kept["rows"][1]["ours"]["accuracy"]["seeds"] == 2
    written = (out / "feature-map.md").read_text()
    assert "| paper |  | 77.6 | 0.883 |" in written
    assert "Ours at the smoke scale, the paper's at its own." in written
    for run in kept["runs"]:
        lines = (out / run["folder"] / "metrics.jsonl").read_text().splitlines()
        assert run["train_accuracy"] == json.loads(lines[-1])["accuracy"] / 100
        assert run["seconds"] > 0
    assert "<html" in (out / "feature-map" / "report.html").read_text()
    main(["feature-map", "--out", str(tmp_path)])
    assert "0 runs to train" in capsys.readouterr().out


def test_several_studies_by_one_command(tmp_path, capsys, monkeypatch):
    """With what all of them take first; runs that they share are trained once."""
    chosen = {name: STUDIES[name] for name in ("feature-map", "priors", "rank")}
    monkeypatch.setattr("featureflock.cli.reproduce.STUDIES", chosen)
    main(["all", "--seeds", "1", "--out", str(tmp_path)])
    printed = " ".join(capsys.readouterr().out.split())
    runs = {cell.folder for study in chosen.values() for cell in study_runs(study, "smoke", tmp_path / "smoke", 1)}
    assert len(runs) < sum(len(study.rows) for study in chosen.values())
    assert f"3 studies; {len(runs)} runs to train." in printed
    assert all(folder.is_dir() for folder in runs)
    assert all((tmp_path / "smoke" / name / "report.html").is_file() for name in chosen)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_runs_at_the_smallest_scale(name, shared_runs):
    """Its rows have all the numbers that it is about, each within its limits."""
    study = STUDIES[name]
    outcome = reproduce(study, "smoke", shared_runs, seeds=1)
    assert outcome.results is not None
    rows = outcome.results["rows"]
    assert [row["title"] for row in rows] == [row.title for row, _ in study.rows_at("smoke")]
    for row in rows:
        wanted = {column for column in study.columns if row["members"] > 1 or column not in ABOUT_PAIRS}
        wanted -= {column for column in wanted if column[-1] in "234"}  # of the severities there are 1 and 5 only
        if name == "dominoes":  # at this scale of two-view digits, whose views are called otherwise
            wanted -= {column for column in wanted if "digit" in column or "picture" in column}
        assert row["ours"].keys() == wanted
        for key, value in row["ours"].items():
            assert 0 <= value["mean"] <= (20 if "nll" in key else 2 if key == "covered_views" else 1)
    has_maps = any("map" in column for column in study.columns)
    for evaluation in outcome.evaluations:
        assert (evaluation.maps(evaluation.settings[0].runs[0]) is not None) == has_maps


def test_smaller_deep_ensembles_are_parts_of_the_largest(tmp_path):
    """They are not trained, and have the very numbers of ensembles that are."""
    study = STUDIES["ensemble-size"]
    everything = [c for c in study_runs(study, "smoke", tmp_path, 1) if isinstance(c.recipe.method, DeepEnsembles)]
    assert [cell.size for cell in everything] == [2, 4]
    assert len({cell.folder for cell in everything}) == 1
    largest = everything[-1].recipe
    small = replace(largest, members=2)
    train(largest, tmp_path / "four")
    train(small, tmp_path / "two")
    four, two = (ff.load(tmp_path / name / "ensemble") for name in ("four", "two"))
    for i in range(2):
        ours, theirs = two.extractors[i].state_dict(), four.extractors[i].state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_differences_are_paired_by_seed_with_deep_ensembles_of_that_size(tmp_path):
    outcome = reproduce(STUDIES["ensemble-size"], "smoke", tmp_path)
    rows, runs = outcome.results["rows"], outcome.results["runs"]
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


def test_by_severity_is_the_mean_over_corruptions(shared_runs):
    outcome = reproduce(STUDIES["severity"], "smoke", shared_runs, seeds=1)
    entry = outcome.evaluations[0].results["runs"][0]
    for severity in ("1", "5"):
        sets = [by[severity]["calibrated"]["accuracy"] for by in entry["corrupted"].values()]
        assert len(sets) == 2
        assert entry["summary"][f"accuracy_at_severity_{severity}"] == pytest.approx(sum(sets) / 2)


def test_the_laptop_keeps_what_rows_differ_in():
    ranks = [recipe.method.rank for _, recipe in STUDIES["rank"].rows_at("laptop")]
    assert ranks == [1, 2, 5, None]
    widths = [recipe.model.widths[-1] for _, recipe in STUDIES["width"].rows_at("laptop")]
    assert widths == [32, 32, 64, 64, 128, 128]
    sizes = [recipe.size for _, recipe in STUDIES["ensemble-size"].rows_at("laptop")]
    assert sizes == [1, 2, 5, 10] * 2


def test_on_a_laptop_other_data_are_cifar10_and_nothing_is_trained_twice(tmp_path):
    known = {cell.folder for cell in study_runs(STUDIES["cifar10"], "laptop", tmp_path)}
    for name in ("cifar100", "imagenet", "severity", "cam-similarity"):
        assert {cell.folder for cell in study_runs(STUDIES[name], "laptop", tmp_path)} <= known
    for name in ("severity", "cam-similarity"):
        titles = [row.title for row, _ in STUDIES[name].rows_at("laptop")]
        assert titles == ["Deep Ensembles, CIFAR-10", "feature-WGD, CIFAR-10"]


def test_the_list_and_the_price(capsys):
    main(["--list"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in STUDIES)
    assert re.search(r"imagenet +ResNet-50 × 5 on ImageNet, clean and corrupted +6, 9, 3 +\d+ days", printed)
    paper = [RECIPES["cifar10-wrn16x4"].recipe] * 5
    assert "floating-point operations" in cost(paper)
    assert gpu_time(paper) == f"{5 * training_flop(paper[0]) / (0.3 * 312e12) / 3600:.0f} hours"
    assert "seconds" in cost([RECIPES["digits"].recipe])
    assert gpu_time([RECIPES["digits"].recipe]) == "minutes"


def test_torchrun_is_for_train(tmp_path, monkeypatch):
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
