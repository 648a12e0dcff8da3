"""Human labels: scores against naive loops and SciPy, subsets of the test set, and files that are refused."""

import json
import math
import pickle

import numpy as np
import pytest
import torch
from helpers.small_ensembles import train_small
from scipy.special import entr
from scipy.stats import entropy, spearmanr

from featureflock import evaluation as ev
from featureflock.data import Digits
from featureflock.evaluation import EvaluationProtocol, evaluate_runs
from featureflock.evaluation.human_labels import (
    calibrated_human_scores,
    human_scores,
    read_human_labels,
)
from featureflock.evaluation.plan import plan_evaluation
from featureflock.evaluation.predictions import load_predictions
from featureflock.reports.tables import comparison

KEYS = [f"{kind}human_{name}" for kind in ("", "raw_") for name in ("cross_entropy", "entropy_correlation")]
LABELS = torch.arange(12) % 3


def random_human(labels, classes, seed=0):
    """Counts of 50 people, most of whom choose the label."""
    rng = np.random.default_rng(seed)
    counts = np.stack([rng.multinomial(20, rng.dirichlet(np.full(classes, 0.3))) for _ in labels])
    counts[np.arange(len(labels)), np.asarray(labels)] += 30
    return counts


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return train_small(tmp_path_factory.mktemp("runs"), epochs=1)


@pytest.fixture(scope="module")
def counts():
    return random_human(Digits().load().test.labels, 10)


@pytest.fixture
def file(tmp_path, counts):
    np.save(tmp_path / "human.npy", counts)
    return tmp_path / "human.npy"


def naive(p, h):
    """Cross-entropy by loops, and SciPy's correlation of SciPy's entropies; rounding must not break ties of people."""
    total = 0.0
    for row, people in zip(p, h, strict=True):
        for c in range(len(row)):
            if people[c]:
                total -= people[c] * math.log(row[c])
    return total / len(p), spearmanr(entr(p).sum(1), entropy(h, axis=1).round(12)).statistic


def random_predictions(b=60, c=4, seed=0):
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(rng.integers(0, c, b))
    logits = torch.from_numpy(rng.normal(0, 2, (b, c)))
    logits[torch.arange(b), labels] += 1.5
    human = random_human(labels, c)
    return logits.log_softmax(-1), labels, torch.from_numpy(human / human.sum(1, keepdims=True))


def test_raw_scores_are_those_of_naive_loops_and_scipy():
    log_p, _, human = random_predictions()
    human[:5] = torch.eye(4)[torch.arange(5) % 4]  # people who agree: 0 · log p, and ties
    assert human_scores(log_p, human) == pytest.approx(naive(log_p.exp().numpy(), human.numpy()))


def test_calibrated_scores_use_the_temperature_of_the_other_half():
    log_p, labels, human = random_predictions(61)
    generator, parts = torch.Generator().manual_seed(0), []
    for _ in range(5):
        order = torch.randperm(61, generator=generator)
        first, second = order[:30], order[30:]
        for half, other in ((first, second), (second, first)):
            temperature = ev.fit_temperature(log_p[other], labels[other])
            p = (log_p[half] / temperature).softmax(-1)
            parts.append(naive(p.numpy(), human[half].numpy()))
    found = calibrated_human_scores(log_p, human, ev.calibrated(log_p, labels).temperatures)
    assert found == pytest.approx(np.mean(parts, 0), rel=1e-6)


def test_the_cross_entropy_is_least_for_the_human_distribution_itself():
    _, _, human = random_predictions()
    human = (human + 0.01) / (human + 0.01).sum(1, keepdim=True)
    best = human_scores(human.log(), human)
    assert best.cross_entropy == pytest.approx(entropy(human.numpy(), axis=1).mean())
    assert best.entropy_correlation == pytest.approx(1, abs=1e-3)  # rounding breaks ties of the predictions
    other = (human.log() * 1.2).log_softmax(-1)
    assert human_scores(other, human).cross_entropy > best.cross_entropy


def test_with_one_hot_labels_the_cross_entropy_is_the_nll():
    log_p, labels, _ = random_predictions()
    one_hot = torch.nn.functional.one_hot(labels, 4).double()
    found = human_scores(log_p, one_hot)
    assert found.cross_entropy == pytest.approx(ev.scores(log_p, labels).nll)
    assert found.entropy_correlation is None  # people are equally certain everywhere
    temperatures = (calibrated := ev.calibrated(log_p, labels)).temperatures
    assert calibrated_human_scores(log_p, one_hot, temperatures).cross_entropy == pytest.approx(calibrated.scores.nll)


def test_the_same_counts_of_other_classes_are_tied():
    """0.7, 0.2, 0.06, 0.04 in any order: their entropies are equal, although sums of floats depend on the order."""
    rng = np.random.default_rng(0)
    human = torch.from_numpy(np.stack([rng.permutation([0.7, 0.2, 0.06, 0.04]) for _ in range(50)]))
    assert len(set(torch.special.entr(human).sum(1).tolist())) > 1
    log_p, _, _ = random_predictions(50)
    assert human_scores(log_p, human).entropy_correlation is None


@pytest.mark.parametrize("examples", [None, 37])
def test_a_subset_of_the_test_set_uses_its_own_rows(runs, file, counts, examples):
    protocol = EvaluationProtocol(examples=examples, corruptions=(), ood=(), maps=0, human_labels=file)
    results = evaluate_runs(runs[:1], protocol).results
    plan = plan_evaluation(runs[:1], protocol)
    cached = load_predictions(plan.runs[0], plan.test_sets[0])
    assert len(cached.positions) == (examples or len(counts))
    log_p, human = ev.average(cached.log_probs), counts[cached.positions.numpy()]
    human = human / human.sum(1, keepdims=True)
    summary = results.runs[0].summary
    expected = naive(log_p.exp().numpy(), human)
    assert (summary["raw_human_cross_entropy"], summary["raw_human_entropy_correlation"]) == pytest.approx(expected)
    temperatures = results.runs[0].clean.temperatures
    calibrated = calibrated_human_scores(log_p, torch.from_numpy(human), temperatures)
    assert (summary["human_cross_entropy"], summary["human_entropy_correlation"]) == pytest.approx(calibrated)
    if examples:
        first = counts[:examples] / counts[:examples].sum(1, keepdims=True)
        assert naive(log_p.exp().numpy(), first)[0] != pytest.approx(expected[0], rel=1e-3)


def test_they_are_measured_only_if_the_file_is_given_and_use_the_cached_predictions(runs, file, monkeypatch):
    protocol = EvaluationProtocol(corruptions=("contrast",), severities=(2,), ood=(), maps=5)
    without = evaluate_runs(runs, protocol).results
    assert not any("human" in key for key in without.groups[0].metrics)
    assert not any("Human" in text for text in comparison(without).header_texts)
    monkeypatch.setattr("featureflock.evaluation.predictions.Predictor.log_probs", pytest.fail)
    given = evaluate_runs(runs, EvaluationProtocol(**{**vars(protocol), "human_labels": file})).results
    for group in given.groups:
        assert set(KEYS) <= group.metrics.keys()
    assert set(KEYS) <= given.groups[1].differences.keys()
    assert {"Human CE ↓", "Human ρ ↑"} <= set(comparison(given).header_texts)
    for key, value in without.groups[0].metrics.items():
        assert given.groups[0].metrics[key] == value
    json.dumps(given.to_json(), allow_nan=False)


# ---- files


def test_counts_and_probabilities_of_any_type_are_read(tmp_path):
    counts = random_human(LABELS, 3)
    expected = torch.from_numpy(counts / counts.sum(1, keepdims=True))
    for k, values in enumerate(
        (counts.astype(np.uint8), counts.astype(np.float32), expected.numpy(), counts.T.copy().T)
    ):
        np.save(tmp_path / f"{k}.npy", values)
        assert torch.allclose(read_human_labels(tmp_path / f"{k}.npy", LABELS, 3), expected)


def changed(row, column, value):
    counts = random_human(LABELS, 3).astype(np.float64)
    counts[row, column] = value
    return counts


WRONG = {
    "rows": (random_human(LABELS[:11], 3), r"has shape \(11, 3\); the test set has 12 examples of 3 classes"),
    "columns": (random_human(LABELS, 4), r"has shape \(12, 4\)"),
    "flat": (np.ones(36), r"has shape \(36,\)"),
    "negative": (changed(7, 1, -1), "negative numbers in row 7"),
    "NaN": (changed(3, 0, math.nan), "NaN or infinite numbers in row 3"),
    "infinite": (changed(3, 0, math.inf), "NaN or infinite numbers in row 3"),
    "zero": (changed(5, slice(None), 0), "no label at all in row 5"),
    "huge": (changed(5, slice(None), 1.7e308), "numbers that are too large in row 5"),
    "words": (np.full((12, 3), "cat"), "it is an array of <U3"),
    "complex": (np.ones((12, 3), complex), "it is an array of complex128"),
    "another order": (
        random_human(LABELS.roll(1), 3),
        "its most frequent label is the true one for 0 % of the examples",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_numbers_are_refused(tmp_path, case):
    values, message = WRONG[case]
    np.save(tmp_path / "human.npy", values)
    with pytest.raises(ValueError, match=message) as caught:
        read_human_labels(tmp_path / "human.npy", LABELS, 3)
    assert str(tmp_path / "human.npy") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_of_another_kind_are_refused(tmp_path):
    path = tmp_path / "human.npy"
    with pytest.raises(ValueError, match=r"human\.npy is missing; give an \.npy file"):
        read_human_labels(path, LABELS, 3)
    with pytest.raises(ValueError, match="cannot be read"):
        read_human_labels(tmp_path, LABELS, 3)
    good = random_human(LABELS, 3)
    np.savez(tmp_path / "human.npz", good)
    for content in (b"1,2,3", b"", pickle.dumps(good), (tmp_path / "human.npz").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"is not an \.npy file; write one with numpy\.save"):
            read_human_labels(path, LABELS, 3)
    np.save(path, np.array([[None, good]], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="contains Python objects, which are not loaded"):
        read_human_labels(path, LABELS, 3)
    np.save(path, good)
    for length in (7, 40, 100, len(path.read_bytes()) - 1):
        np.save(path, good)
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(ValueError, match="is damaged"):
            read_human_labels(path, LABELS, 3)


def test_a_wrong_file_is_refused_before_any_prediction(runs, tmp_path, monkeypatch):
    np.save(tmp_path / "human.npy", np.ones((3, 10)))
    monkeypatch.setattr("featureflock.evaluation.predictions.Predictor.log_probs", pytest.fail)
    with pytest.raises(ValueError, match=r"has shape \(3, 10\)"):
        evaluate_runs(runs, EvaluationProtocol(human_labels=tmp_path / "human.npy"))


def test_predictions_and_human_labels_must_fit():
    log_p, _, human = random_predictions()
    with pytest.raises(ValueError, match="must have the same shape"):
        human_scores(log_p, human[:-1])
