"""The demo: its scores by hand, its verdict, and the real command."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from featureflock.demo import METHODS, Outcome, Settings, left_share, score
from featureflock.demo_report import summarise, tables, verdict

FLOCK = Path(sys.executable).with_name("featureflock")


def test_scores_by_hand():
    probs = torch.tensor([[[0.8, 0.2], [0.4, 0.6]], [[0.6, 0.4], [0.9, 0.1]]])  # two members, two pictures
    got = score(probs.log(), torch.tensor([0, 1]))
    assert got["accuracy"] == pytest.approx(50)  # averages: 0.7 and 0.65 for class 0
    assert got["nll"] == pytest.approx(-(math.log(0.7) + math.log(0.35)) / 2)
    assert got["disagreement"] == pytest.approx(50)


def test_left_share_by_hand():
    clean = torch.tensor([[[0.9, 0.1]]]).log()
    left = torch.tensor([[[0.3, 0.7]]]).log()  # without the left half the prediction is lost
    right = torch.tensor([[[0.9, 0.1]]]).log()  # without the right half nothing changes
    logits = {"clean": clean, "left blank": left, "right blank": right}
    assert float(left_share(logits)) == pytest.approx(1, abs=1e-4)
    assert float(left_share({**logits, "left blank": right, "right blank": left})) == pytest.approx(0, abs=1e-4)
    assert float(left_share({**logits, "right blank": left})) == pytest.approx(0.5)


def outcomes(gain: float, noise: float) -> list[Outcome]:
    """Made-up results: feature-WGD is better than all others by `gain`, give or take `noise` with the seed."""
    made = []
    for seed in range(4):
        for method in METHODS:
            accuracy = 90 + seed + (gain + noise * (-1) ** seed if method == "feature-WGD" else 0)
            scores = {"accuracy": accuracy, "nll": -accuracy / 100, "disagreement": 3.0}
            made.append(Outcome(method, seed, {"clean": scores}, 0.1, [[0.5] * 10]))
    return made


@pytest.mark.parametrize(
    ("gain", "noise", "words"),
    [
        (2.0, 0.1, "feature-WGD against Deep Ensembles, accuracy: better on clean (+2.00)."),
        (-2.0, 0.1, "feature-WGD against Deep Ensembles, accuracy: worse on clean (-2.00)."),
        (0.5, 3.0, "feature-WGD against Deep Ensembles, accuracy: no clear difference on clean."),
        (2.0, 0.1, "feature-WGD against Deep Ensembles, NLL: better on clean (-0.020)."),
    ],
)
def test_the_verdict_says_who_wins(gain, noise, words):
    summary = summarise(outcomes(gain, noise), Settings(seeds=4))
    assert words in verdict(summary)


def test_intervals_are_paired_and_students():
    summary = summarise(outcomes(2.0, 1.0), Settings(seeds=4))
    d = summary["feature-WGD minus"]["Deep Ensembles"]["clean"]["accuracy"]
    # Differences 3, 1, 3, 1: mean 2, sd √(4/3), t(0.975; 3) = 3.182446.
    assert d["mean"] == pytest.approx(2)
    assert d["ci95"] == pytest.approx(3.182446 * math.sqrt(4 / 3) / 2, rel=1e-6)
    assert len(tables(summary)) == 2


def test_the_command_writes_a_report(tmp_path):
    command = [FLOCK, "demo", "--seeds", "2", "--members", "2", "--epochs", "1", "--out", "out"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    for words in ("feature-WGD", "Deep Ensembles", "shared head", "left blank", "disagreement", "wrote out"):
        assert words in run.stdout
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(results["runs"]) == 2 * len(METHODS)
    assert results["provenance"]["command"].startswith("featureflock demo --seeds 2")
    assert "| feature-WGD |" in (tmp_path / "out" / "report.md").read_text()
    for picture in ("accuracy.png", "views.png"):
        assert (tmp_path / "out" / picture).read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_ends_it_with_a_sentence(tmp_path):
    with subprocess.Popen(
        [FLOCK, "demo"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Whoever runs the tests may ignore Ctrl-C, and processes inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    ) as process:
        process.stdout.readline()  # its first words: training begins, or the processes are starting
        time.sleep(2)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the command and all its processes
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert errors.strip() == "featureflock: stopped; no report was written."
    assert not list((tmp_path / "featureflock-demo").iterdir())
    for _ in range(100):  # no process is left behind
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("the demo left processes behind")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "1"], "at least 2 seeds"),
        (["--epochs", "0"], "1 epoch"),
        (["--out", "file"], "is a file"),
        (["--seed", "3"], "Perhaps you meant"),
        (["--members", "many"], "members"),
    ],
)
def test_a_users_mistake_gets_a_sentence(tmp_path, arguments, words):
    (tmp_path / "file").write_text("")
    run = subprocess.run([FLOCK, "demo", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode != 0
    assert words in run.stderr + run.stdout
    assert "Traceback" not in run.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
