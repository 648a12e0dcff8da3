"""A run is one thing: files that do not belong to it are named, and cached predictions are bound to their content."""

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.small_ensembles import train_small
from PIL import Image

import featureflock as ff
from featureflock.cli import main as cli
from featureflock.corruptions import generate_set
from featureflock.data import CIFAR10, CustomData, Digits, ImageFolder
from featureflock.data.sources import cache
from featureflock.evaluation import EvaluationProtocol, evaluate_runs
from featureflock.evaluation import test_sets as sets
from featureflock.evaluation.predictions import Predictor, has_predictions, predict, store_predictions
from featureflock.evaluation.runs import read_run
from featureflock.methods import DeepEnsembles, FeatureWGD
from featureflock.models import CNNConfig, MLPConfig
from featureflock.training import Recipe, train
from featureflock.training.manifest import FILES
from featureflock.utils.digests import json_digest

CLEAN = EvaluationProtocol(corruptions=(), ood=(), maps=0)
BRACKETS = b"[" * 50_000


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Deep Ensembles and feature-WGD."""
    return train_small(tmp_path_factory.mktemp("runs"), seeds=(0,), epochs=1)


@pytest.fixture
def runs(trained, tmp_path):
    for name, folder in zip(("de", "wgd"), trained, strict=True):
        shutil.copytree(folder, tmp_path / name)
    return tmp_path / "de", tmp_path / "wgd"


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Run a command; returns its error message."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["featureflock", *map(str, words)])
        try:
            cli.main()
        except SystemExit as end:
            return end.code
        finally:
            capsys.readouterr()
        return None

    return call


def commands(run, tmp_path):
    """Everything that reads a run."""
    Image.new("L", (8, 8), 100).save(tmp_path / "digit.png")
    flags = ("--corruptions", "--ood", "--maps", "0")
    yield "evaluate", run, *flags
    yield "report", run, *flags
    yield "predict", run, tmp_path / "digit.png"
    yield "export", run, "--out", tmp_path / "model.pt2"


def test_an_ensemble_of_another_run_is_refused_by_every_command(runs, tmp_path, command):
    ours, theirs = runs
    shutil.rmtree(ours / "ensemble")
    shutil.copytree(theirs / "ensemble", ours / "ensemble")
    for words in commands(ours, tmp_path):
        message = command(*words)
        assert message.startswith(f"featureflock: {ours / 'ensemble'} does not belong to this run"), words
        assert message.endswith("restore it, or train the run again in another folder.")
    assert not (tmp_path / "featureflock-report").exists() or not list((tmp_path / "featureflock-report").iterdir())


@pytest.mark.parametrize(("name", "field"), [("inputs.json", "white"), ("result.json", "members")])
def test_a_changed_number_is_refused_by_every_command(runs, tmp_path, command, name, field):
    path = runs[0] / name
    path.write_text(json.dumps({**json.loads(path.read_text()), field: 7}))
    for words in commands(runs[0], tmp_path):
        assert command(*words).startswith(f"featureflock: {path} does not belong to this run"), words


@pytest.mark.parametrize("name", FILES)
def test_every_damaged_file_is_named_in_one_sentence(runs, name):
    path, other = runs[0] / name, (runs[1] / name).read_bytes()
    intact = path.read_bytes()
    one_bit = intact[:10] + bytes([intact[10] ^ 1]) + intact[11:]
    for content in (one_bit, intact[:-5], b"", b"{}", b"[]", b"5", b'{"a": 1e999}', BRACKETS, b"\x00" * 99, other):
        if content == intact:  # the inputs of both runs are the same
            continue
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} does not belong to this run: modified, damaged or copied") as end:
            read_run(runs[0])
        assert "\n" not in str(end.value)
    path.write_bytes(intact)
    assert read_run(runs[0]).method == "Deep Ensembles"
    path.unlink()
    with pytest.raises((OSError, ValueError), match=f"{name} is missing; restore it|is not finished|is not a run"):
        read_run(runs[0])


def test_several_files_are_named(runs):
    for name in ("metrics.jsonl", "result.json"):
        shutil.copy(runs[1] / name, runs[0] / name)
    with pytest.raises(ValueError, match=r"metrics\.jsonl and result\.json do not belong to this run"):
        read_run(runs[0])


def test_the_manifest_of_another_run_is_named(runs):
    shutil.copy(runs[1] / "manifest.json", runs[0] / "manifest.json")
    with pytest.raises(ValueError, match=r"manifest\.json does not belong to the other files in .*: recipe\.json, "):
        read_run(runs[0])


def test_damaged_weights_are_refused_also_if_all_predictions_are_cached(runs):
    evaluate_runs([runs[0]], CLEAN)
    (weights,) = (runs[0] / "ensemble").glob("*.safetensors")
    data = weights.read_bytes()
    weights.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    with pytest.raises(ValueError, match=r"weights-\w+\.safetensors is missing, truncated or modified"):
        evaluate_runs([runs[0]], CLEAN)
    weights.write_bytes(data)
    evaluate_runs([runs[0]], CLEAN)


def _forged(value, **changes):
    value = {key: part for key, part in {**value, **changes}.items() if key != "sha256" and part is not None}
    return json.dumps({**value, "sha256": json_digest(value)}).encode()


def test_every_damaged_manifest_is_one_sentence_and_can_be_made_again(runs):
    path = runs[0] / "manifest.json"
    intact = path.read_bytes()
    value = json.loads(intact)
    for content in (
        *(b"", b"{", b"[]", b"{}", BRACKETS, intact[:-9], intact.replace(b'"train"', b'"Train"')),
        *(_forged(value, files=5), _forged(value, weights=None), _forged(value, version=2), _forged(value, data=[])),
        _forged(value, files={"recipe.json": "x"}),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"manifest\.json is .*; remove it, then repeat the command") as end:
            read_run(runs[0])
        assert "\n" not in str(end.value)
    path.unlink()
    with pytest.raises(ValueError, match="is not finished; resume it by the command that started it"):
        read_run(runs[0])
    result = json.loads((runs[0] / "result.json").read_text())
    recipe = Recipe.from_json(json.loads((runs[0] / "recipe.json").read_text()))
    again = train(recipe, runs[0], resume=True)  # from the last checkpoint
    assert again["test"] == result["test"]
    assert read_run(runs[0]).manifest.weights == value["weights"] != read_run(runs[1]).manifest.weights
    assert read_run(runs[0]).manifest.data == value["data"]


def test_a_run_may_be_moved_and_calibrated(runs, tmp_path):
    before = read_run(runs[0])
    ens = ff.load(runs[0] / "ensemble")
    ens.temperature = 2.0
    ff.save(ens, runs[0] / "ensemble")
    shutil.move(runs[0], tmp_path / "moved")
    after = read_run(tmp_path / "moved")
    assert after.manifest == before.manifest
    assert float(after.load_ensemble().temperature) == 2.0


def test_predictions_are_bound_to_weights_recipe_and_input_format(runs):
    test_set = sets.clean(Digits().load(), EvaluationProtocol(examples=20))
    run, other = map(read_run, runs)
    store_predictions(run, test_set, predict(Predictor(run), test_set))
    shutil.copytree(runs[0] / "predictions", runs[1] / "predictions")
    assert has_predictions(run, test_set)
    assert not has_predictions(other, test_set)
    files, manifest = run.manifest.files, run.manifest
    for changed in (
        replace(manifest, weights="other"),
        replace(manifest, files={**files, "inputs.json": "other"}),
        replace(manifest, files={**files, "recipe.json": "other"}),
    ):
        assert not has_predictions(replace(run, manifest=changed), test_set)
    assert has_predictions(replace(run, manifest=replace(manifest, files={**files, "result.json": "other"})), test_set)


def test_metrics_on_a_damaged_corrupted_set_are_refused_and_right_after_its_repair(tmp_path, temp_cache, command):
    """From the command line, with a small version of CIFAR-10 in the cache."""
    rng = np.random.default_rng(0)
    y = {part: np.arange(count, dtype=np.uint8) % 10 for part, count in (("train", 60), ("test", 40))}
    x = {
        part: rng.integers(0, 150, (len(y[part]), 32, 32, 3), np.uint8) + 10 * y[part][:, None, None, None]
        for part in y
    }
    arrays = {f"{part}_{k}": each[part] for part in y for k, each in (("x", x), ("y", y))}
    cache.store("cifar10", arrays, source="made up", published=False)
    train(Recipe(CIFAR10(), CNNConfig(2), DeepEnsembles(), 2, epochs=1, batch=20), tmp_path / "run")
    options = {"corruptions": ("fog", "contrast"), "severities": (3,), "workers": 1, "log": lambda text: None}
    generate_set(x["test"], y["test"], temp_cache / "cifar10-c", **options)
    chosen = ("--corruptions", "fog", "contrast", "--severities", "3", "--ood", "--maps", "0")
    evaluate = ("evaluate", tmp_path / "run", *chosen)

    def scores():
        return json.loads((tmp_path / "featureflock-evaluation" / "results.json").read_text())["runs"][0]["corrupted"]

    assert command(*evaluate) is None
    intact_scores = scores()
    path = temp_cache / "cifar10-c" / "fog.npy"
    intact = path.read_bytes()
    shutil.rmtree(tmp_path / "run" / "predictions")
    path.write_bytes(intact[:200] + bytes(len(intact) - 200))
    message = command(*evaluate)
    assert message.startswith(f"featureflock: {path} is damaged: its digest is not that in featureflock.json; repeat")
    path.write_bytes(intact)
    assert command(*evaluate) is None
    assert scores() == intact_scores


def image_tree(folder, names=("ant", "bee")):
    for part in ("train", "val"):
        for k, name in enumerate(names):
            (folder / part / name).mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (8, 8), (100 * k + 20 * i, 30, 0)).save(folder / part / name / f"{i}.bmp")
    return folder


@pytest.fixture
def on_images(tmp_path):
    """A run on image files, and their folder."""
    folder = image_tree(tmp_path / "images")
    recipe = Recipe(ImageFolder(folder, size=8, workers=0), MLPConfig((4,)), DeepEnsembles(), 2, epochs=1, batch=3)
    train(recipe, tmp_path / "run")
    return tmp_path / "run", folder


def test_test_images_that_were_replaced_are_predicted_again_and_noted(on_images):
    run, folder = on_images
    first = evaluate_runs([run], CLEAN).results
    assert not any("have changed" in note for note in first.notes)
    Image.new("RGB", (8, 8), (250, 250, 250)).save(folder / "val" / "bee" / "1.bmp")
    second = evaluate_runs([run], CLEAN).results
    assert "The test data have changed since these runs were trained: run." in second.notes
    assert second.runs[0].clean.raw != first.runs[0].clean.raw


def test_classes_in_another_order_are_refused(on_images):
    run, folder = on_images
    for part in ("train", "val"):
        (folder / part / "ant").rename(folder / part / "cat")
    with pytest.raises(ValueError, match=r"not have the input format that .*run was trained on \(class_names\)"):
        evaluate_runs([run], CLEAN)


def test_runs_of_one_recipe_on_different_training_data_are_noted(on_images, tmp_path):
    run, folder = on_images
    Image.new("RGB", (8, 8), (250, 250, 250)).save(folder / "train" / "bee" / "1.bmp")
    data = ImageFolder(folder, size=8, workers=0)
    train(Recipe(data, MLPConfig((4,)), FeatureWGD(), 2, epochs=1, batch=3), tmp_path / "other")
    notes = evaluate_runs([run, tmp_path / "other"], CLEAN).results.notes
    assert "Some runs were trained on different training data, although their recipes are the same." in notes


def test_custom_data_with_another_normalisation_are_refused(tmp_path):
    x, y = torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8), torch.arange(20) % 2
    recipe = Recipe(CustomData((x, y), (x, y)), MLPConfig((4,)), DeepEnsembles(), 2, epochs=1, batch=10)
    train(recipe, tmp_path / "run")
    evaluate_runs([tmp_path / "run"], CLEAN, data=CustomData((x, y), (x[:10], y[:10])))
    with pytest.raises(ValueError, match=r"input format that .*run was trained on \(normalisation\)"):
        evaluate_runs([tmp_path / "run"], CLEAN, data=CustomData((x // 2, y), (x, y)))
