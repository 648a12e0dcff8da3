"""The demo: a study of five methods through the ordinary training, evaluation and report."""

import json

import pytest

from featureflock.cli.demo import demo_study, main, story
from featureflock.methods import DeepEnsembles, FeatureMAP, FeatureWGD, Single

QUICK = ["--seeds", "1", "--members", "2", "--epochs", "1", "--workers", "1"]


def test_rows_add_one_part_of_the_method_after_another():
    study = demo_study(members=5, epochs=60)
    methods = [row.recipe.method for row in study.rows]
    assert [type(method) for method in methods] == [Single, DeepEnsembles, FeatureMAP, FeatureWGD, FeatureWGD]
    assert methods[3] == FeatureWGD()  # the paper's
    assert methods[2].prior == methods[4].prior
    assert methods[4].repulsion > 1
    assert study.new_subsets
    assert [row.recipe.size for row in study.rows] == [1, 5, 5, 5, 5]
    assert len({(row.recipe.data, row.recipe.subset, row.recipe.epochs) for row in study.rows}) == 1


def test_one_seed_prints_the_table_and_writes_the_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main([*QUICK, "--out", "out"])
    printed = capsys.readouterr().out
    for words in ("feature-WGD, tuned", "Deep Ensembles", "NLL, one view", "wrote out/report.html"):
        assert words in printed
    assert "<html" in (tmp_path / "out" / "report.html").read_text()
    results = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert [row["title"] for row in results["rows"]][1] == "Deep Ensembles"
    assert len(results["runs"]) == 5
    assert all({"nll", "one_view_nll", "one_view_accuracy"} <= row["ours"].keys() for row in results["rows"])


def test_the_story_has_the_differences_and_their_significance():
    def row(title: str, accuracy: float, low: float | None, high: float | None) -> dict:
        keys = (
            "accuracy",
            "one_view_accuracy",
            "nll",
            "one_view_nll",
            "corrupted_accuracy",
            "view_difference_by_input",
        )
        difference = {"mean": accuracy - 0.9, "low": low, "high": high, "seeds": 5}
        return {
            "title": title,
            "ours": {key: {"mean": accuracy} for key in keys},
            "differences": dict.fromkeys(keys, difference),
        }

    rows = [row("Deep Ensembles", 0.9, None, None), row("feature-WGD, tuned", 0.92, 0.01, 0.03)]
    heading, *sentences = story({"rows": rows})
    assert heading == "feature-WGD, tuned vs Deep Ensembles:"
    better = "92.00 % against 90.00 %, +2.00 [1.00, 3.00], significantly better."
    assert sentences[:2] == [
        f"  Accuracy on whole images: {better}",
        f"  Accuracy with one half blank: {better}",
    ]
    assert sentences[2].endswith("0.9200 against 0.9000, +0.0200 [0.0100, 0.0300], significantly worse.")
    assert sentences[5].endswith("0.920 against 0.900, +0.020 [0.010, 0.030].")  # neither is better
    rows[1] = row("feature-WGD, tuned", 0.92, None, None)  # one seed
    assert story({"rows": rows})[1] == "  Accuracy on whole images: 92.00 % against 90.00 %."


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
