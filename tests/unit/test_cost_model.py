"""The cost model of a step, on cases worked out by hand; and that its bytes are those of the formula."""

import importlib
import math
from pathlib import Path

import pytest

from featureflock.methods import DeepEnsembles, FeatureWGD, WeightWGD

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("cost_model")


@pytest.fixture
def sizes(model):
    """n = 5 members, batches of 12, 3 features, 2 classes, 100 weights and 10 statistics of an extractor."""
    return model.Sizes(FeatureWGD(), 5, 12, 3, 2, 100, 10)


@pytest.fixture
def machine(model):
    """A member takes 1 s + 0.5 s per example, the rest 2 s; a sum 0.1 s + 1 s per 1,000 bytes, a gather half of it."""
    links = {"sum": model.Link(0.1, 1000.0), "gather": model.Link(0.05, 2000.0)}
    return model.Machine(model.Cost(1.0, 0.5), model.Cost(2.0, 0.0), links)


def test_one_process_sends_nothing(model, machine, sizes):
    parts = model.step_seconds(machine, sizes, 1, 1)
    assert parts == {"members": 5 * (1 + 6), "after": 2.0, "n × n sums": 0.0, "gather": 0.0, "gradients": 0.0}


def test_members_axis(model, machine, sizes):
    """⌈5/2⌉ = 3 members. Half of 3 · 12 · 3 features and of 5 · 6 · 3 gradients, and 5 · 6 · 2 logits, go to the other
    process; the gradient of the head, 8 floats, and 52 float64 are summed; half of the examples are left after that."""
    parts = model.step_seconds(machine, sizes, 2, 1)
    assert parts["members"] == 3 * 7
    assert parts["gather"] == pytest.approx(3 * 0.05 + 4 * (3 * 12 * 3 / 2 + 5 * 6 * 3 / 2 + 5 * 6 * 2) / 2000)
    assert parts["gradients"] == pytest.approx(0.1 + 4 * 8 / 1000)
    assert parts["n × n sums"] == pytest.approx(0.1 + 8 * 52 / 1000)
    machine = model.Machine(machine.member, model.Cost(2.0, 0.5), machine.links)
    assert model.step_seconds(machine, sizes, 2, 1)["after"] == 2 + 0.5 * 6


def test_data_axis(model, machine, sizes):
    """4 examples each; a sum among 3 processes sends 4/3 of its bytes; 5 · 110 floats of members and 8 of the head."""
    parts = model.step_seconds(machine, sizes, 1, 3)
    assert parts["members"] == 5 * 3
    assert parts["gather"] == 0
    assert parts["n × n sums"] == pytest.approx(0.1 + 4 / 3 * 8 * 52 / 1000)
    assert parts["gradients"] == pytest.approx(0.2 + 4 / 3 * 4 * (5 * 110 + 8) / 1000)


def test_gradients_hide_behind_two_thirds_of_the_members(model, machine, sizes):
    apart = model.step_seconds(machine, sizes, 1, 3)["gradients"]
    slow = {"sum": model.Link(10.0, 1000.0), "gather": machine.links["gather"]}
    hidden = model.Machine(machine.member, machine.after, machine.links, overlapped=True)
    longer = model.Machine(machine.member, machine.after, slow, overlapped=True)
    assert apart > 0
    assert model.step_seconds(hidden, sizes, 1, 3)["gradients"] == 0
    assert model.step_seconds(longer, sizes, 1, 3)["gradients"] == pytest.approx(apart + 2 * 9.9 - 2 / 3 * 15)


@pytest.mark.parametrize(
    ("cores", "processes", "expected"),
    [(2, 1, 1.0), (2, 2, 1.2), (2, 4, 2.4), (5, 3, 1.1), (5, 5, 1.2), (1, 3, 3.6), (math.inf, 100, 1.0)],
)
def test_processes_share_cores(model, cores, processes, expected):
    """κ = 1.2: all cores busy slow each other down; more processes than cores take turns."""
    cost = model.Cost(1.0, 0.0)
    assert model.Machine(cost, cost, {}, cores, 1.2).slow_down(processes) == pytest.approx(expected)


def test_slow_down_applies_to_computation_only(model, machine, sizes):
    shared = model.Machine(machine.member, machine.after, machine.links, cores=1)
    own, turns = (model.step_seconds(m, sizes, 2, 1) for m in (machine, shared))
    assert turns["members"] == 2 * own["members"]
    assert turns["after"] == 2 * own["after"]
    assert turns["gather"] == own["gather"]


def test_costs(model):
    assert model.Cost(1.0, 0.5).seconds(4) == 3.0
    assert model.Cost(1.0, 0.5, least=7.0).seconds(4) == 7.0
    line = model.Cost.through([(2, 5.0), (4, 9.0), (6, 13.0)])
    assert (line.fixed, line.per_example) == pytest.approx((1.0, 2.0))
    below = model.Cost.through([(1, 0.0), (2, 2.0)])  # its line would start at −2; through 0 its slope is 4/5
    assert (below.fixed, below.per_example) == pytest.approx((0.0, 0.8))
    falling = model.Cost.through([(1, 3.0), (2, 1.0)])
    assert (falling.fixed, falling.per_example) == (2.0, 0.0)


@pytest.mark.parametrize(("method", "gathered"), [(DeepEnsembles(), 3 * 6 * 2), (WeightWGD(), 3 * 6 * 2 + 2 * 3 * 108)])
def test_bytes_of_other_methods(model, method, gathered):
    sizes = model.Sizes(method, 5, 12, 3, 2, 100, 10)
    passed = sizes.bytes_passed(2, 2)
    assert passed["n × n sums"] == 0
    assert passed["gather"] == 4 * gathered
    assert passed["gradients"] == 4 * 3 * ((2 if isinstance(method, WeightWGD) else 1) * 108 + 10)


def test_projection_of_large_ensembles(model):
    """On 100 GPUs each has one of 100 members; a thousand small members on one GPU take a thousand times one."""
    rows = {(row["ensemble"], row["members × data"]): row for row in model.projected()}
    five, hundred = rows["ResNet-50 × 5", "5 × 1"], rows["ResNet-50 × 100", "100 × 1"]
    assert five["members, ms"] == hundred["members, ms"]
    assert float(hundred["gather, ms"]) > 50 * float(five["gather, ms"])  # more members, between nodes
    small = [float(rows["WRN-16-1 × 1,000", mesh]["members, ms"]) for mesh in ("1 × 1", "40 × 1")]
    assert small[0] == pytest.approx(40 * small[1])
