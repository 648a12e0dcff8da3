"""The demo: a study of five methods through the ordinary training, evaluation and report."""

import json

import pytest

from featureflock.cli.demo import demo_study, main
from featureflock.methods import DeepEnsembles, FeatureMAP, FeatureWGD, Single

QUICK = ["--seeds", "1", "--members", "2", "--epochs", "1", "--workers", "1"]


def test_rows_add_one_part_of_the_method_after_another():
    study = demo_study(members=5, epochs=60)
    methods = [row.recipe.method for row in study.rows]
    assert [type(method) for method in methods] == [Single, DeepEnsembles, FeatureMAP, FeatureMAP, FeatureWGD]
    assert methods[3].prior == methods[4].prior
    assert [row.recipe.size for row in study.rows] == [1, 5, 5, 5, 5]
    assert len({(row.recipe.data, row.recipe.subset, row.recipe.epochs) for row in study.rows}) == 1


def test_one_seed_prints_the_table_and_writes_the_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main([*QUICK, "--out", "out"])
    printed = capsys.readouterr().out
    for words in ("feature-WGD", "Deep Ensembles", "NLL", "cA, %", "wrote out/report.html"):
        assert words in printed
    assert "<html" in (tmp_path / "out" / "report.html").read_text()
    results = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert [row["title"] for row in results["rows"]][1] == "Deep Ensembles"
    assert len(results["runs"]) == 5
    assert all({"nll", "corrupted_nll", "only_left_accuracy"} <= row["ours"].keys() for row in results["rows"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--epochs", "0"], "epochs must be at least 1"),
        (["--members", "1"], "--members must be at least 2"),
        (["--out", "file"], "cannot be created"),
    ],
)
def test_mistakes_get_one_sentence(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises((ValueError, OSError), match=words):
        main(arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
