"""Training, resuming, evaluation and reports of regression, multi-label and segmentation runs."""

import json
from dataclasses import replace

import pytest
import torch
from helpers.short_runs import same, weights
from torch.testing import assert_close

import featureflock as ff
from featureflock.cli import evaluate as evaluate_command
from featureflock.cli import predict as predict_command
from featureflock.cli import report as report_command
from featureflock.cli import train as train_command
from featureflock.data import CustomData, Diabetes, Diamonds, DigitScenes, HeldOut, InputFormat
from featureflock.evaluation import evaluate_runs
from featureflock.evaluation.runs import read_run
from featureflock.methods import ADP, DeepEnsembles, FeatureWGD
from featureflock.models import MLPConfig
from featureflock.tasks import Classification, HeteroscedasticRegression, MultiLabel, Regression
from featureflock.training import RECIPES, Recipe, TrainingInterrupted, train
from featureflock.training.reporters import Reporter

SHORT = replace(RECIPES["diabetes"].recipe, members=3, epochs=3, learning_rate=0.01)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    recipes = {
        "wgd": SHORT,
        "de": replace(SHORT, method=DeepEnsembles()),
        "by-input": replace(SHORT, data=Diabetes("by-input")),
        "pixels": replace(RECIPES["digit-scenes"].recipe, members=2, epochs=1, subset=80),
        "labels": replace(RECIPES["digit-sets"].recipe, members=2, epochs=1, subset=80),
    }
    for name, recipe in recipes.items():
        train(recipe, folder / name)
    return folder


def test_a_run_predicts_in_the_unit_of_the_targets(runs):
    splits, ens = SHORT.splits(), ff.load(runs / "wgd" / "ensemble")
    assert ens.task.target_mean == pytest.approx([float(splits.train.labels.mean())])
    x = next(splits.test.batches([torch.arange(100)], torch.device("cpu"))).x
    assert_close(x.mean(0), torch.zeros(10), atol=0.5, rtol=0)
    prediction, y = ens.predict(x), splits.test.labels
    rmse = float((prediction.mean[:, 0] - y).square().mean().sqrt())
    result = json.loads((runs / "wgd" / "result.json").read_text())
    assert result["test"]["rmse"] == pytest.approx(rmse, rel=1e-5)
    assert 40 < rmse < 90  # the standard deviation of the targets is 77
    members = ens.member_predictions(x).double()
    assert result["test"]["nll"] == pytest.approx(float(ens.task.nll(members, y[:, None]).mean()), rel=1e-5)
    again = read_run(runs / "wgd").load_ensemble()
    assert_close(again.predict(x), prediction)
    inputs = InputFormat.from_json(json.loads((runs / "wgd" / "inputs.json").read_text()))
    assert inputs.target_std == ens.task.target_std
    assert inputs.feature_names[:3] == ("age", "sex", "bmi")


def test_target_statistics_are_those_of_the_examples_trained_on():
    recipe = replace(SHORT, validation=100)
    splits = recipe.splits()
    assert len(splits.train) == 242
    assert splits.task.target_mean == pytest.approx([float(splits.train.labels.mean())])
    assert splits.task.target_mean != pytest.approx([float(SHORT.splits().train.labels.mean())])
    assert HeldOut(Diabetes(), 50).task == Regression()
    assert len(HeldOut(Diabetes(), 50).load().test) == 50


class StopAfter(Reporter):
    def __init__(self, step):
        self.at = step

    def step(self, step, averages):
        if step == self.at:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("method", [FeatureWGD(), DeepEnsembles()], ids=repr)
def test_a_resumed_run_is_bit_identical(method, tmp_path):
    recipe = replace(SHORT, method=method, validation=40)
    train(recipe, tmp_path / "one")
    with pytest.raises(TrainingInterrupted):
        train(recipe, tmp_path / "two", reporter=StopAfter(14))
    train(recipe, tmp_path / "two", resume=True)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert "log_variance" in one
    assert one["log_variance"].abs().min() > 1e-3
    assert same(one, two)
    line = json.loads((tmp_path / "one" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"member_nll", "rmse"} <= line.keys()
    assert {"rmse", "nll", "member_rmse"} <= line["validation"].keys()


def test_regression_runs_are_compared_by_their_own_metrics(runs, tmp_path, capsys):
    results = evaluate_runs([runs / "wgd", runs / "de"]).results
    assert results.task == "regression"
    for group, name in zip(results.groups, ("wgd", "de"), strict=True):
        test = json.loads((runs / name / "result.json").read_text())["test"]
        assert group.metrics["rmse"].mean == pytest.approx(test["rmse"], rel=1e-5)
        assert group.metrics["raw_nll"].mean == pytest.approx(test["nll"], rel=1e-5)
        assert group.metrics["member_rmse"].mean == pytest.approx(sum(test["member_rmse"]) / 3, rel=1e-5)
        assert "accuracy" not in group.metrics
    assert {"rmse", "crps", "nll", "coverage"} <= results.groups[0].differences.keys()
    report_command.main([str(runs / "wgd"), str(runs / "de"), "--out", str(tmp_path / "report")])
    text = (tmp_path / "report" / "report.html").read_text()
    assert "CRPS" in text
    assert "Calibration error" in text
    for absent in ("accuracy", "ECE", "class activation", "temperature", "probabilities"):
        assert absent not in text.split("<h3>Runs</h3>")[0].split("<body>")[1], absent
    report_command.main([str(tmp_path / "report" / "results.json")])  # from the results alone
    assert "RMSE" in capsys.readouterr().out


def test_one_regression_run_is_reported(runs, tmp_path):
    evaluate_command.main([str(runs / "by-input"), "--out", str(tmp_path / "e")])
    assert "RMSE" in (tmp_path / "e" / "table.md").read_text()
    report_command.main([str(tmp_path / "e"), "--out", str(tmp_path / "r")])
    assert "its members have" in (tmp_path / "r" / "report.html").read_text()


def test_segmentation_and_labels_are_reported(runs, tmp_path):
    report_command.main([str(runs / "pixels"), "--examples", "60", "--out", str(tmp_path / "pixels")])
    results = json.loads((tmp_path / "pixels" / "results.json").read_text())
    assert results["dense"]
    metrics = results["groups"][0]["metrics"]
    assert 0 < metrics["mean_iou"]["mean"] < metrics["accuracy"]["mean"] <= 1
    report_command.main([str(runs / "labels"), "--out", str(tmp_path / "labels")])
    results = json.loads((tmp_path / "labels" / "results.json").read_text())
    assert "exact_match" in results["groups"][0]["metrics"]
    test = json.loads((runs / "labels" / "result.json").read_text())["test"]
    label_accuracy = results["groups"][0]["metrics"]["label_accuracy"]["mean"]
    assert 100 * label_accuracy == pytest.approx(test["accuracy"], rel=1e-5)


def test_rows_of_a_csv_file_are_predicted_in_original_units(runs, tmp_path, capsys):
    splits, ens = SHORT.splits(), ff.load(runs / "wgd" / "ensemble")
    names, x = splits.feature_names, splits.test.x[:4]
    order = [3, *range(3), *range(4, 10)]
    lines = [",".join(names[k] for k in order)] + [",".join(str(float(row[k])) for k in order) for row in x]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    predict_command.main([str(runs / "wgd"), str(tmp_path / "rows.csv"), "--json"])
    found = json.loads(capsys.readouterr().out)
    mean, variance = ens.predict(next(splits.test.batches([torch.arange(4)], torch.device("cpu"))).x)
    assert [row["mean"] for row in found] == pytest.approx(mean[:, 0].tolist(), rel=1e-5)
    assert [row["std"] for row in found] == pytest.approx(variance[:, 0].sqrt().tolist(), rel=1e-5)
    predict_command.main([str(runs / "wgd"), str(tmp_path / "rows.csv")])
    assert "standard deviation" in capsys.readouterr().out
    for text, message in (
        ("age,sex\n1,2\n", "bmi is missing"),
        (
            "\n".join([lines[0], lines[1].replace(lines[1].split(",")[0], "high", 1)]),
            "row 1: bp must be a finite number",
        ),
        (lines[0] + "\n", "no rows"),
    ):
        (tmp_path / "wrong.csv").write_text(text)
        with pytest.raises(ValueError, match=message):
            predict_command.main([str(runs / "wgd"), str(tmp_path / "wrong.csv")])
    with pytest.raises(ValueError, match="CSV files are for regression runs; this run is for MultiLabel"):
        predict_command.main([str(runs / "labels"), str(tmp_path / "rows.csv")])
    with pytest.raises(FileNotFoundError, match="There is no file"):
        predict_command.main([str(runs / "wgd"), "none.csv"])


def test_what_does_not_apply_is_refused_in_a_sentence(runs, tmp_path):
    with pytest.raises(ValueError, match="Corrupted and OOD test sets are for data with one class per image"):
        evaluate_command.main([str(runs / "wgd"), "--ood", "noise", "--out", str(tmp_path / "e")])
    with pytest.raises(ValueError, match=r"The inputs of this run are not images .*; give a CSV file"):
        predict_command.main([str(runs / "wgd"), "image.png"])
    with pytest.raises(ValueError, match="predict shows one class per image; this run is for MultiLabel"):
        predict_command.main([str(runs / "labels"), "image.png"])
    for method in ("adp", "dice"):
        with pytest.raises(ValueError, match="is defined for one class per example only, not for Regression"):
            train_command.main(["diabetes", "--method", method, "--out", str(tmp_path / method)])
        assert not (tmp_path / method).exists()
    with pytest.raises(ValueError, match=r"not for targets of shape \(1500, 24, 24\)"):
        train(replace(RECIPES["digit-scenes"].recipe, method=ADP()), tmp_path / "dense")


def test_custom_data_of_any_task(tmp_path):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 5, generator=g)
    targets = {
        "numbers": (x[:, :2].double(), Regression()),
        "one number": (x[:, 0], HeteroscedasticRegression()),
        "labels": ((x[:, :3] > 0).long(), MultiLabel()),
    }
    for name, (y, task) in targets.items():
        for i, part in enumerate(((x.numpy(), y.numpy()), torch.utils.data.TensorDataset(x, y))):
            data = CustomData(part, part, task=task)
            recipe = Recipe(data, MLPConfig((8,)), FeatureWGD(), members=2, epochs=2, batch=20, learning_rate=0.01)
            result = train(recipe, tmp_path / f"{name} {i}")
            ens = ff.load(tmp_path / f"{name} {i}" / "ensemble")
            assert isinstance(ens.task, type(task))
            assert set(result["test"]) & {"rmse", "accuracy"} == {task.score}
    with pytest.raises(ValueError, match="must be integers"):
        CustomData((x, x[:, 0]), (x, x[:, 0])).load()
    with pytest.raises(ValueError, match="NaN or infinite"):
        CustomData((x, x[:, 0] / 0), (x, x[:, 0]), task=Regression()).load()


def test_diamonds_are_read_from_the_package_or_the_sentence_says_what_to_install(monkeypatch):
    from featureflock.data.sets import tabular

    splits = Diamonds().load()
    assert (len(splits.train), len(splits.test), splits.train.shape) == (43_940, 10_000, (9,))
    price = splits.train.labels.exp()
    assert 300 < float(price.min()) < 400
    assert 18_000 < float(price.max()) < 19_000
    batch = next(splits.train.batches([torch.arange(43_940)], torch.device("cpu")))
    assert_close(batch.x.mean(0), torch.zeros(9), atol=1e-3, rtol=0)
    assert_close(batch.x.std(0), torch.ones(9), atol=1e-3, rtol=0)
    monkeypatch.setattr(tabular.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"run pip install \"featureflock\[diamonds\]\""):
        Diamonds().load()


def test_scenes_have_the_classes_of_their_pixels():
    pixels, labels = DigitScenes("pixels").load(), DigitScenes("labels").load()
    assert isinstance(pixels.task, Classification)
    x, y = pixels.train.x[:, 0], pixels.train.labels
    assert torch.equal(y > 0, x >= 4)
    assert torch.equal(x, labels.train.x[:, 0])
    present = torch.stack([(y == digit + 1).flatten(1).any(1) for digit in range(10)], 1)
    assert torch.equal(present.float(), labels.train.labels)
    counts = present.sum(1)
    assert 1 <= int(counts.min()) <= int(counts.max()) <= 4
