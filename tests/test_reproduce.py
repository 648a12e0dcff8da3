"""Studies: what differs between rows, the paper's numbers, and workers that share a folder."""

import json
import multiprocessing
import re
from dataclasses import replace
from pathlib import Path

import pytest

from featureflock.commands.reproduce import main
from featureflock.methods import DeepEnsembles, FeatureWGD
from featureflock.recipes import STUDIES, Row, Shard, Study, cells, reproduce
from featureflock.recipes.costs import cost, training_flop
from featureflock.recipes.study import CLEAN
from featureflock.training import RECIPES
from featureflock.training.recipe import describe
from featureflock.training.run_folder import RunFolder

SCALES = ("smoke", "laptop", "paper")
SMALL = Study(
    "two ways",
    tuple(Row(m.title, replace(RECIPES["cifar10-wrn16x4"].recipe, method=m)) for m in (DeepEnsembles(), FeatureWGD())),
    CLEAN,
    seeds=2,
)


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("scale", SCALES)
def test_rows_differ_at_every_scale(name, scale, tmp_path):
    folders = [cell.folder for cell in cells(STUDIES[name], scale, tmp_path)]
    assert len(set(folders)) == len(folders) == len(STUDIES[name].rows) * STUDIES[name].seeds_at(scale)


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
        differing = {key for key, value in describe(table.recipe(row, "paper", 0)).items() if base[key] != value}
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
        ("rank", "r = 10", "accuracy", "82.7"),
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
    outcomes = [done.get(timeout=240) for _ in workers]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    folders = [cell.folder for cell in cells(SMALL, "smoke", tmp_path)]
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
    alone = context.Process(target=work, args=(tmp_path / "alone", (1, 1), done))  # with as many threads
    alone.start()
    assert done.get(timeout=240)[1] == again.results["rows"]
    alone.join(60)


def test_a_cell_that_somebody_else_has_is_left_to_them(tmp_path):
    everything = cells(SMALL, "smoke", tmp_path)
    with RunFolder(everything[1].folder).locked():
        outcome = reproduce(SMALL, "smoke", tmp_path)
    assert [cell.folder for cell in outcome.left] == [everything[1].folder]
    assert outcome.results is None
    assert reproduce(SMALL, "smoke", tmp_path).results is not None


def test_the_command_prints_our_numbers_beside_the_papers(tmp_path, capsys):
    main(["feature-map", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert re.search(r"feature-MAP +\d+\.\d ± \d", printed)
    assert "0.883" in printed
    kept = json.loads((tmp_path / "smoke" / "feature-map.json").read_text())
    assert kept["rows"][1]["paper"]["nll"] == "0.883"
    assert kept["rows"][1]["ours"]["accuracy"]["seeds"] == 2
    assert "| *paper* | 77.6 | 0.883 |" in (tmp_path / "smoke" / "feature-map.md").read_text()
    main(["feature-map", "--out", str(tmp_path)])
    assert "0 runs to train" in capsys.readouterr().out


def test_the_list_and_the_price(capsys):
    main(["--list"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in STUDIES)
    assert "floating-point operations" in cost([RECIPES["cifar10-wrn16x4"].recipe])
    assert "seconds" in cost([RECIPES["digits"].recipe])


def test_torchrun_is_for_train(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--shard 1/8"):
        main(["cifar10", "--out", str(tmp_path)])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["cifar11"], "cifar10"),
        (["cifar10", "--shard", "9/8"], "such as 3/8"),
        (["cifar10", "--shard", "three"], "such as 3/8"),
        (["cifar10", "--seeds", "0"], "at least 1"),
    ],
)
def test_mistakes_get_one_sentence(args, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        main([*args, "--out", str(tmp_path)])
