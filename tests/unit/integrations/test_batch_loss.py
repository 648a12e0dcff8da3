"""What the integrations with training libraries share, without these libraries.

Shapes: n members, B examples, H features, C classes.
"""

import copy
import importlib
import sys

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import featureflock as ff
from featureflock.ensemble.inputs import inputs_of, split_batch
from featureflock.integrations.as_ensemble import as_ensemble
from featureflock.integrations.batch_loss import BatchLoss, check_data_parallel, join_targets
from featureflock.integrations.chained_optimiser import ChainedOptimiser
from featureflock.methods import ADP, DICE, DeepEnsembles, FeatureMAP, FeatureWGD, Single, WeightWGD
from featureflock.tasks import Classification, Regression

N, B, H, C = 3, 12, 5, 4


def extractors():
    torch.manual_seed(0)
    return [nn.Linear(H, H) for _ in range(N)]


def ensemble(members, head, method, task=None, trunk=None, train_size=None):
    return as_ensemble(members, head, method, task, trunk, train_size)


def test_methods_get_the_heads_that_they_need():
    head, heads = nn.Linear(H, C), [nn.Linear(H, C) for _ in range(N)]
    assert ensemble(extractors(), head, FeatureWGD()).head is head
    assert list(ensemble(extractors(), heads, DeepEnsembles()).head) == heads
    assert len(ensemble(extractors()[:1], head, Single())) == 1
    for method in (DeepEnsembles(), ADP(), DICE()):
        with pytest.raises(ValueError, match="has one head per member; give a list of 3"):
            ensemble(extractors(), head, method, train_size=B)
    with pytest.raises(ValueError, match="feature-WGD has a shared head; give one"):
        ensemble(extractors(), heads, FeatureWGD())
    with pytest.raises(ValueError, match="WeightWGD needs train_size"):
        ensemble(extractors(), heads, WeightWGD())


def test_an_ensemble_is_used_as_it_is():
    ens = FeatureWGD().build(lambda: nn.Linear(H, H), lambda: nn.Linear(H, C), members=N)
    assert ensemble(ens, None, FeatureWGD()) is ens
    with pytest.raises(ValueError, match="An Ensemble is complete; leave out head, task"):
        ensemble(ens, nn.Linear(H, C), FeatureWGD(), Regression())
    for members in (extractors(), []):
        with pytest.raises(ValueError, match="Give an Ensemble, or extractors and a head"):
            ensemble(members, None if members else nn.Linear(H, C), FeatureWGD())


def test_task_trunk_and_members_in_one_network():
    trunk = nn.Linear(H, H).requires_grad_(False)
    ens = ensemble(ff.rank_one(nn.Linear(H, H), N), nn.Linear(H, 1), FeatureWGD(), Regression(), trunk)
    assert ens.task == Regression()
    assert ens.trunk is trunk
    assert not trunk.training
    assert ens(torch.randn(B, H)).shape == (N, B, 1)


@pytest.mark.parametrize("method", [FeatureWGD(repulsion=20.0), FeatureMAP()], ids=lambda method: method.title)
def test_parts_that_are_accumulated_are_the_whole(method):
    """Of a method whose examples interact, only the last part has a gradient."""
    torch.manual_seed(1)
    x, y = torch.randn(B, H), torch.arange(B) % C
    ens = ensemble(extractors(), nn.Linear(H, C), method)
    whole = copy.deepcopy(ens)
    method.loss(whole, x, y).loss.backward()
    losses, means = BatchLoss(ens, method), []
    for k, rows in enumerate(torch.arange(B).split(4)):
        loss = losses(x[rows], y[rows], last=k == 2)
        (loss.backward / 3).backward()
        means.append(loss.mean)
        assert (ens.head.weight.grad is None) == (isinstance(method, FeatureWGD) and k < 2)
    for p, q in zip(ens.parameters(), whole.parameters(), strict=True):
        assert_close(p.grad, q.grad)
    if isinstance(method, FeatureWGD):
        assert means[:2] == [None, None]
        assert_close(means[2], method.loss(whole, x, y).loss.detach())


def test_parts_of_a_step_that_was_not_completed_can_be_forgotten():
    torch.manual_seed(1)
    x, y = torch.randn(B, H), torch.arange(B) % C
    method = FeatureWGD()
    ens = ensemble(extractors(), nn.Linear(H, C), method)
    losses = BatchLoss(ens, method)
    losses(x, y, last=False)
    losses.clear()
    assert_close(losses(x[:4], y[:4], last=True).mean, method.loss(ens, x[:4], y[:4]).loss.detach())


def test_what_cannot_be_trained_is_refused():
    ens = ensemble(extractors(), nn.Linear(H, C), FeatureWGD())
    with pytest.raises(TypeError, match="got Linear and FeatureWGD"):
        BatchLoss(nn.Linear(H, C), FeatureWGD())
    with pytest.raises(ValueError, match="ADP is defined for one class per example only"):
        BatchLoss(ensemble(extractors(), [nn.Linear(H, 1) for _ in range(N)], ADP(), Regression()), ADP())
    with pytest.raises(ValueError, match="has no particle layer, which feature-WGD trains; build it with"):
        BatchLoss(ff.Ensemble(extractors(), nn.Linear(H, C)), FeatureWGD())
    with pytest.raises(ValueError, match="loss of DICE cannot be split over a batch; train it with one process"):
        check_data_parallel(ens, DICE())
    ens.layer.rule = ff.WGD(noise=0.1)
    with pytest.raises(ValueError, match="Langevin noise cannot be computed for parts of a batch"):
        check_data_parallel(ens, FeatureWGD())


def test_targets_of_tokens_are_padded_with_the_index_to_ignore():
    parts = [torch.tensor([[1, 2]]), torch.tensor([[0, 1, 2]])]
    joined = join_targets(parts, Classification(dim=-1, ignore_index=-100))
    assert joined.tolist() == [[1, 2, -100], [0, 1, 2]]
    with pytest.raises(ValueError, match=r"targets of shapes \(1, 2\) and \(1, 3\); pad them to one length"):
        join_targets(parts, Classification(dim=-1))


def test_batches():
    x, y = torch.zeros(2, H), torch.zeros(2)
    for batch in ((x, y), [x, y]):
        assert split_batch(batch)[0] is x
        assert split_batch(batch)[1] is y
        assert inputs_of(batch) is x
    assert inputs_of([x]) is x
    assert inputs_of(x) is x
    inputs, labels = split_batch({"input_ids": x, "attention_mask": y, "labels": y})
    assert [*inputs] == ["input_ids", "attention_mask"]
    assert labels is y
    for batch, got in ((x, "a Tensor"), ({"a": x, "b": y}, "a mapping of a, b"), ((x, y, y), "3 items")):
        with pytest.raises(ValueError, match=rf"Batches must be pairs .* got {got}"):
            split_batch(batch)


def test_calibration_takes_batches_that_are_mappings():
    torch.manual_seed(0)
    x, y = torch.randn(40, H), torch.arange(40) % C
    ens = ff.Ensemble([nn.Linear(H, H) for _ in range(N)], nn.Linear(H, C))
    expected = ff.calibrate(ens, [(x, y)])
    ens.temperature = 1.0
    assert ff.calibrate(ens, [{"input": x, "labels": y}]) == expected


def test_chained_optimisers_are_the_optimisers():
    """Their steps, their state in a checkpoint, and a schedule that changes the rates of the first one only."""

    def start():
        torch.manual_seed(0)
        a, b = nn.Linear(2, 2), nn.Linear(2, 2)
        optimisers = [torch.optim.SGD(a.parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(b.parameters(), lr=0.01)]
        return nn.Sequential(a, b), optimisers

    def step(model, optimisers):
        for optimiser in optimisers:
            optimiser.zero_grad()
        model(torch.ones(1, 2)).square().sum().backward()
        for optimiser in optimisers:
            optimiser.step()

    separate, optimisers = start()
    model, ours = start()
    chained = ChainedOptimiser(ours)
    schedule = torch.optim.lr_scheduler.StepLR(chained, 1, gamma=0.5)
    for k in range(3):
        optimisers[0].param_groups[0]["lr"] = 0.1 * 0.5**k
        step(separate, optimisers)
        step(model, [chained])
        schedule.step()
    state = chained.state_dict()
    resumed, others = start()
    resumed.load_state_dict(model.state_dict())
    chained = ChainedOptimiser(others)
    chained.load_state_dict(state)
    optimisers[0].param_groups[0]["lr"] = 0.1 * 0.5**3
    assert chained.param_groups[0]["lr"] == 0.1 * 0.5**3
    assert chained.param_groups[0] is others[0].param_groups[0]
    loss = chained.step(lambda: torch.tensor(1.0))  # gradients are none, so nothing moves
    assert loss == 1.0
    step(separate, optimisers)
    step(resumed, [chained])
    for p, q in zip(resumed.parameters(), separate.parameters(), strict=True):
        assert_close(p, q)


@pytest.mark.parametrize(
    ("name", "packages", "message"),
    [
        ("lightning", ("lightning", "lightning.pytorch", "pytorch_lightning"), r"featureflock\[lightning\]"),
        ("transformers", ("transformers", "accelerate", "accelerate.state"), r"featureflock\[transformers\]"),
    ],
)
def test_a_missing_package_is_named(name, packages, message, monkeypatch):
    monkeypatch.delitem(sys.modules, f"featureflock.integrations.{name}", raising=False)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f'run pip install "{message}"'):
        importlib.import_module(f"featureflock.integrations.{name}")
