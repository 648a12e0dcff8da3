"""Learning rate schedules: closed forms, and runs that follow them, resumed or not."""

import json
import os
import signal
from dataclasses import replace
from math import ceil

import pytest
import torch
from helpers.short_runs import SHORT, same, weights
from torch.testing import assert_close

from featureflock.data import permutation
from featureflock.models import FastCNNConfig
from featureflock.training import Reporter, TrainingInterrupted, train
from featureflock.training.build import build

CYCLE = replace(SHORT, schedule="one-cycle", warmup=0.25, learning_rate=0.2, epochs=4, seed=7)


def test_one_cycle_rises_and_falls_linearly():
    rate = CYCLE.learning_rate_at
    assert [rate(e) for e in (0, 0.5, 1, 2, 3, 4)] == pytest.approx([0, 0.1, 0.2, 0.2 * 2 / 3, 0.2 / 3, 0])
    falling = replace(CYCLE, warmup=0.0).learning_rate_at
    assert [falling(e) for e in (0, 1, 4)] == pytest.approx([0.2, 0.15, 0])
    steps = [rate((t + 0.5) / 5) for t in range(20)]
    assert sum(steps) == pytest.approx(20 * 0.2 / 2)  # the area of a triangle
    assert max(steps) == pytest.approx(0.2 * 0.97, rel=0.01)


def test_step_decay_is_constant_within_an_epoch():
    recipe = replace(SHORT, epochs=4, decay_epochs=(1, 3), decay_ratio=0.5, learning_rate=0.2)
    for epoch, rate in enumerate([0.2, 0.1, 0.1, 0.05]):
        for fraction in (0, 1e-6, 0.5, 1 - 1e-6):
            assert recipe.learning_rate_at(epoch + fraction) == rate


def test_a_run_follows_one_cycle_step_by_step(tmp_path):
    """Against a naive loop with the learning rates of the 20 steps written out: 5 rise, 15 fall."""
    train(CYCLE, tmp_path / "run")
    splits = CYCLE.data.load().split(subset=240)
    ens, method = build(CYCLE, splits), CYCLE.method
    speed = {p: torch.zeros_like(p) for p in ens.parameters()}
    rates = [0.2 * n / 10 for n in (1, 3, 5, 7, 9)] + [0.2 * n / 30 for n in range(29, 0, -2)]
    assert len(rates) == 20 == 4 * ceil(240 / 50)
    left = iter(rates)
    for epoch in range(4):
        for positions in permutation(240, 7, 1, epoch).split(50):
            ens.zero_grad()
            method.loss(ens, splits.train.x[positions].float() / 16, splits.train.labels[positions]).loss.backward()
            rate = next(left)
            with torch.no_grad():
                for p in ens.parameters():
                    gradient = p.grad + 5e-4 * p
                    speed[p] = 0.9 * speed[p] + gradient
                    p -= rate * (gradient + 0.9 * speed[p])
    trained = weights(tmp_path / "run")
    for name, tensor in ens.state_dict().items():
        assert_close(trained[name], tensor, atol=1e-4, rtol=1e-4)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["learning_rate"] for line in lines] == pytest.approx(rates[4::5])  # the last of each epoch


@pytest.mark.parametrize("at", [3, 5, 12])
def test_a_resumed_one_cycle_run_is_bit_identical(at, tmp_path):
    class Interrupt(Reporter):
        def step(self, step, averages):
            if step == at:
                os.kill(os.getpid(), signal.SIGINT)

    recipe = replace(CYCLE, model=FastCNNConfig((8, 16)), members=2)
    train(recipe, tmp_path / "a")
    with pytest.raises(TrainingInterrupted):
        train(recipe, tmp_path / "b", reporter=Interrupt())
    train(recipe, tmp_path / "b", resume=True)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    a, b = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in "ab"
    )
    assert [(m["learning_rate"], m["loss"]) for m in a] == [(m["learning_rate"], m["loss"]) for m in b]
