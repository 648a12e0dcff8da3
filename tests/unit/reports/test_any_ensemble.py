"""ff.report and featureflock report --predictions: a page about arrays of predictions."""

import importlib.util
import json
import re
import sys

import numpy as np
import pytest

import featureflock as ff
from featureflock.cli import main as cli
from featureflock.tasks import Regression

B, C = 120, 3
Y = np.random.default_rng(0).integers(C, size=B)
NAMES = ["cat", "dog", "owl"]


def probs(seed, skill=1.0, examples=B):
    z = np.random.default_rng(seed).normal(size=(4, examples, C))
    if examples == B:
        z[:, np.arange(B), Y] += skill
    p = np.exp(z)
    return p / p.sum(-1, keepdims=True)


def arrays(seed, skill):
    return {
        "probs": probs(seed, skill),
        "corrupted/fog/3": probs(seed + 100, skill / 2),
        "corrupted/rain/12": probs(seed + 200, skill / 3),
        "ood/svhn": probs(seed + 300, examples=50),
    }


METHODS = {
    title: {seed: arrays(10 * k + seed, 1 + 0.5 * k) for seed in range(3)}
    for k, title in enumerate(("Deep Ensembles", "mine"))
}


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Run `featureflock report` in an empty folder; returns what it printed and its error message."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["featureflock", "report", *map(str, words)])
        error = ""
        try:
            cli.main()
        except SystemExit as end:
            error = str(end.code)
        return capsys.readouterr().out, error

    return call


@pytest.fixture
def files(tmp_path):
    paths = []
    for title, seeds in METHODS.items():
        for seed, content in seeds.items():
            paths.append(tmp_path / f"{title.lower().replace(' ', '-')}-seed{seed}.npz")
            np.savez(paths[-1], labels=Y, class_names=np.array(NAMES), **content)
    return paths


def test_the_page_has_all_tables_and_figures(tmp_path):
    page = ff.report(METHODS, Y, tmp_path / "page", data="animals", class_names=NAMES)
    assert page == tmp_path / "page" / "report.html"
    text = page.read_text()
    for words in (
        "Evaluation on animals",
        "Difference vs Deep Ensembles",
        "Accuracy by corruption",
        "severities 3, 12",
        "OOD detection by uncertainty measure",
        "Reliability diagrams",
        "Disputed examples",
        "owl",
        "Predictions were given as arrays",
    ):
        assert words in text
    assert "start from the same weights" not in text
    assert "means over 2 corrupted test sets" in text
    figures = {path.stem for path in (page.parent / "figures").iterdir()}
    assert {"severity", "sub-ensembles", "member-accuracies", "reliability", "risk-coverage"} <= figures
    results = json.loads((page.parent / "results.json").read_text())
    assert results["groups"][1]["differences"]["nll"]["seeds"] == 3


def test_the_command_writes_the_same_results(command, files, tmp_path):
    out, error = command("--predictions", *files, "--data", "animals")
    assert not error
    for words in ("Deep Ensembles", "mine", "Difference vs Deep Ensembles", "animals: 120 test examples"):
        assert words in out
    found = json.loads((tmp_path / "featureflock-report" / "results.json").read_text())
    ff.report(METHODS, Y, tmp_path / "python", data="animals", class_names=NAMES)
    expected = json.loads((tmp_path / "python" / "results.json").read_text())
    del found["provenance"], expected["provenance"]
    assert found == expected
    again, _ = command("featureflock-report/results.json", "--out", "again")
    assert "wrote" in again
    pages = [(tmp_path / name / "report.html").read_bytes() for name in ("again", "featureflock-report")]
    assert pages[0] == pages[1]


def test_method_and_seed_of_a_file(command, tmp_path):
    np.savez("one.npz", logits=np.log(probs(0)), labels=Y, method="my method", seed=4)
    np.savez("Other_Seed_7.npz", probs=probs(0), labels=Y)
    np.savez("third.npz", probs=probs(1), labels=Y)
    _, error = command("--predictions", "one.npz", "Other_Seed_7.npz", "third.npz", "--baseline", "third")
    assert not error
    results = json.loads((tmp_path / "featureflock-report" / "results.json").read_text())
    found = {group["title"]: group["seeds"] for group in results["groups"]}
    assert found == {"my method": [4], "Other": [7], "third": [0]}
    assert results["groups"][0]["metrics"]["nll"] == pytest.approx(results["groups"][1]["metrics"]["nll"])
    assert [group["baseline"] for group in results["groups"]] == ["third", "third", None]


def test_regression_files(command, tmp_path):
    rng, y = np.random.default_rng(0), np.random.default_rng(1).normal(size=B)
    means, variances = y + rng.normal(size=(3, B)), np.full((3, B), 1.0)
    np.savez("a-seed0.npz", means=means, variances=variances, labels=y)
    out, error = command("--predictions", "a-seed0.npz", "--task", "regression")
    assert not error
    assert "RMSE" in out
    results = json.loads((tmp_path / "featureflock-report" / "results.json").read_text())
    assert results["groups"][0]["metrics"]["rmse"]["mean"] == pytest.approx(np.sqrt(np.mean((means.mean(0) - y) ** 2)))


def test_bad_files_are_refused_in_one_sentence(command, files, tmp_path):
    data = bytearray(files[0].read_bytes())
    data[2000] ^= 255
    (tmp_path / "damaged.npz").write_bytes(data)
    (tmp_path / "cut.npz").write_bytes(data[:500])
    (tmp_path / "text.npz").write_text("probs")
    np.save("single.npy", probs(0))
    np.savez("no-labels.npz", probs=probs(0))
    np.savez("objects.npz", probs=np.array([None, {}]), labels=Y)
    np.savez("other-labels.npz", probs=probs(0), labels=Y[::-1])
    np.savez("logits.npz", probs=np.log(probs(0)), labels=Y)
    np.savez("odd.npz", probs=probs(0), labels=Y, seed=0.5)
    twin = tmp_path / "twin.npz"
    np.savez(twin, probs=probs(0), labels=Y, method="mine", seed=1)
    cases = {
        ("absent.npz",): "absent.npz does not exist",
        (".",): ". is a folder",
        ("damaged.npz",): "damaged.npz, probs: the array cannot be read",
        ("cut.npz",): "cut.npz is not an .npz file",
        ("text.npz",): "text.npz is not an .npz file",
        ("single.npy",): "single.npy holds a single array",
        ("no-labels.npz",): "no-labels.npz has no labels, only probs",
        ("objects.npz",): "objects.npz, probs: Python objects are never loaded",
        (files[0], "other-labels.npz"): "have different labels",
        ("logits.npz",): 'logits.npz, probs: .* name them "logits" instead of "probs"',
        ("odd.npz",): "odd.npz: seed must be an integer",
        (files[4], twin): "are both mine, seed 1; name files METHOD-seedK.npz",
        (files[0], twin): "twin.npz has no corrupted/fog/3, which .* has",
        (twin, "--baseline", "yours"): "There is no method 'yours'",
        (twin, "--task", "regression"): "regression needs arrays named means and variances; got probs",
        (twin, "--examples", "50"): "only --calibration is used",
        (twin, "--calibration", "held-out"): "has no arrays validation",
    }
    for words, message in cases.items():
        _, error = command("--predictions", *words)
        assert error.startswith("featureflock: "), words
        assert "\n" not in error, words
        assert re.search(message, error), (words, error)


def test_flags_belong_to_predictions(command, files):
    assert "either runs or --predictions" in command("run", "--predictions", files[0])[1]
    assert "--baseline belongs to --predictions" in command("run", "--baseline", "mine")[1]


def test_the_folder_is_checked_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file; choose a folder"):
        ff.report(None, None, tmp_path / "file")


def test_no_module_hides_the_function():
    assert importlib.util.find_spec("featureflock.report") is None


def test_a_page_about_regression(tmp_path):
    rng, y = np.random.default_rng(0), np.random.default_rng(1).normal(size=B)
    runs = {seed: (y + rng.normal(size=(3, B)), np.full((3, B), 1.0)) for seed in range(2)}
    text = ff.report({"mine": runs}, y, tmp_path, Regression()).read_text()
    assert "RMSE" in text
    assert "Reliability" not in text
