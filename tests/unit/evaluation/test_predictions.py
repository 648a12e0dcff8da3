"""Cached predictions: computed once per run and test set, verified once, and used only for what they are valid for."""

import os
import shutil
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from helpers.small_ensembles import train_small
from PIL import Image
from torch.testing import assert_close
from torch.utils.data import TensorDataset

import featureflock as ff
from featureflock.data import Digits, ImageFolder, StreamedExamples, from_dataset
from featureflock.data.streaming import ExampleReader
from featureflock.evaluation import EvaluationProtocol
from featureflock.evaluation import predictions as cache
from featureflock.evaluation import test_sets as sets
from featureflock.evaluation.predictions import (
    Predictor,
    has_predictions,
    load_predictions,
    predict,
    store_predictions,
)
from featureflock.evaluation.runs import read_run
from featureflock.evaluation.test_sets import EvaluationSet
from featureflock.methods import DeepEnsembles


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_small(tmp_path_factory.mktemp("runs"), [DeepEnsembles()], [0], epochs=1)[0]


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return read_run(tmp_path / "run")


@pytest.fixture(scope="module")
def splits():
    return Digits().load()


def compute(run, test_set):
    store_predictions(run, test_set, predict(Predictor(run), test_set))


def test_predictions_are_those_of_the_members(run, splits):
    test_set = sets.clean(splits)
    compute(run, test_set)
    cached = load_predictions(run, test_set)
    (batch,) = splits.test.batches([torch.arange(len(splits.test))], torch.device("cpu"))
    ens = ff.load(run.folder.ensemble).eval()
    with torch.no_grad():
        expected = ens(batch.x).log_softmax(-1)
    assert_close(cached.log_probs, expected, atol=1e-5, rtol=0)
    assert torch.equal(cached.labels, splits.test.labels)
    assert_close(cached.log_probs.exp().mean(0), ens.predict(batch.x), atol=1e-6, rtol=0)


def test_a_larger_file_serves_a_subset_but_not_the_other_way_round(run, splits):
    some, every = sets.clean(splits, EvaluationProtocol(examples=50)), sets.clean(splits)
    compute(run, some)
    assert has_predictions(run, some)
    assert not has_predictions(run, every)
    first = load_predictions(run, some)
    compute(run, every)
    assert has_predictions(run, some)
    again = load_predictions(run, some)
    assert torch.equal(again.positions, some.positions)
    assert torch.equal(again.labels, first.labels)
    assert_close(again.log_probs, first.log_probs, atol=1e-5, rtol=0)  # other batches, other rounding


def test_a_subset_does_not_replace_a_larger_file(run, splits):
    """As when two evaluations run at the same time."""
    some, every = sets.clean(splits, EvaluationProtocol(examples=50)), sets.clean(splits)
    late = predict(Predictor(run), some)
    compute(run, every)
    store_predictions(run, some, late)
    assert len(load_predictions(run, every).labels) == 597
    path = run.folder.predictions / "clean.safetensors"
    path.unlink()
    compute(run, some)
    with pytest.raises(ValueError, match="has no predictions on clean"):
        load_predictions(run, every)


def test_other_weights_or_another_test_set_invalidate_them(run, splits):
    test_set = sets.clean(splits)
    compute(run, test_set)
    other = EvaluationSet("clean", "clean", "another", test_set.positions, test_set.load)
    assert not has_predictions(run, other)
    with pytest.raises(ValueError, match="has no predictions on clean; evaluate it first"):
        load_predictions(run, other)
    manifest = replace(run.manifest, weights="other")
    assert not has_predictions(replace(run, manifest=manifest), test_set)


def test_files_that_changed_are_predicted_again(tmp_path):
    for part in ("train", "val"):
        for k in range(2):
            (tmp_path / part / str(k)).mkdir(parents=True)
            Image.new("L", (8, 8), 200 * k).save(tmp_path / part / str(k) / "x.png")
    before = sets.clean(ImageFolder(tmp_path, size=8, workers=0).load())
    assert before.identity == sets.clean(ImageFolder(tmp_path, size=8, workers=0).load()).identity
    assert before.identity != sets.clean(ImageFolder(tmp_path, size=6, workers=0).load()).identity
    path = tmp_path / "val" / "1" / "x.png"
    old = path.stat()
    Image.new("L", (8, 8), 10).save(path)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns + 10_000))
    assert before.identity != sets.clean(ImageFolder(tmp_path, size=8, workers=0).load()).identity


def test_a_torch_dataset_has_a_new_identity_in_every_process():
    data = TensorDataset(torch.rand(6, 3), torch.arange(6) % 2)
    examples = from_dataset(data)
    assert examples.digest() == from_dataset(data).digest()
    assert examples.identity() != from_dataset(data).identity()


def test_saving_a_temperature_does_not_invalidate_them(run, splits):
    test_set = sets.clean(splits)
    compute(run, test_set)
    ens = ff.load(run.folder.ensemble)
    ens.temperature = 2.0
    ff.save(ens, run.folder.ensemble)
    assert has_predictions(read_run(run.folder.path), test_set)


def _one_bit(data):
    return data[:-40_000] + bytes([data[-40_000] ^ 1]) + data[-39_999:]


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"x" * len(b), _one_bit])
def test_a_damaged_file_is_computed_again(run, splits, damage):
    test_set = sets.clean(splits)
    compute(run, test_set)
    before, path = load_predictions(run, test_set), run.folder.predictions / "clean.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    assert not has_predictions(run, test_set)
    compute(run, test_set)
    assert torch.equal(load_predictions(run, test_set).log_probs, before.log_probs)


def test_a_file_is_verified_once_per_process_and_again_when_it_changes(run, splits, monkeypatch):
    test_set = sets.clean(splits, EvaluationProtocol(examples=20))
    compute(run, test_set)
    digests, digest = [], cache._digest
    monkeypatch.setattr(cache, "_digest", lambda tensors: digests.append(1) or digest(tensors))
    for _ in range(3):
        assert has_predictions(run, test_set)
        load_predictions(run, test_set)
    assert len(digests) == 1
    path = run.folder.predictions / "clean.safetensors"
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000))
    load_predictions(run, test_set)
    assert len(digests) == 2


def test_an_unwritable_folder_is_named(run, splits):
    run.folder.predictions.write_text("not a folder")
    with pytest.raises(OSError, match="predictions could not be written to"):
        compute(run, sets.clean(splits, EvaluationProtocol(examples=10)))


def test_an_interrupted_prediction_leaves_no_file(run, splits):
    test_set = sets.clean(splits)

    def fail(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict(Predictor(run), test_set, fail)
    assert not run.folder.predictions.exists()


def test_members_with_predictions_that_are_not_finite_are_named(run, splits):
    ens = ff.load(run.folder.ensemble)
    with torch.no_grad():
        for p in ens.extractors[1].parameters():
            p.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"predictions of member 1 of .* are not finite"):
        Predictor(run, load_ensemble=lambda: ens).log_probs(splits.test)


class Scans(ExampleReader):
    """Digits, some of which cannot be read."""

    def __init__(self, x, broken):
        self.x, self.broken = x, broken

    def read(self, index, key):
        if index in self.broken:
            raise OSError("broken")
        return self.x[index]

    def name(self, index):
        return f"scan {index}"

    def digest(self):
        return "scans"


def test_unreadable_examples_are_left_out_and_not_requested_again(run, splits):
    test = splits.test
    streamed = StreamedExamples(Scans(test.x, {3, 300, 301}), test.labels, normalisation=test.normalisation)
    test_set = EvaluationSet("clean", "streamed", "scans", torch.arange(len(test)), streamed.select)
    compute(run, test_set)
    assert has_predictions(run, test_set)
    cached = load_predictions(run, test_set)
    assert sorted(set(range(len(test))) - set(cached.positions.tolist())) == [3, 300, 301]
    assert torch.equal(cached.labels, test.labels[cached.positions])
    every = Predictor(run).log_probs(test).log_probs
    assert_close(cached.log_probs, every[:, cached.positions], atol=1e-5, rtol=0)


def test_the_file_holds_float32_log_probabilities(run, splits):
    test_set = sets.clean(splits, EvaluationProtocol(examples=20))
    compute(run, test_set)
    path = run.folder.predictions / "clean.safetensors"
    tensors = safetensors.torch.load_file(path)
    assert tensors["log_probs"].shape == (3, 20, 10)
    assert tensors["log_probs"].dtype == torch.float32
    assert_close(tensors["log_probs"].exp().sum(-1), torch.ones(3, 20))
