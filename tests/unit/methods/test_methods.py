"""Methods: what they build and minimise, and the equality of Deep Ensembles members with networks trained alone."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers.short_runs import METHODS
from torch import nn
from torch.testing import assert_close

import featureflock as ff
from featureflock.methods import ADP, DICE, DeepEnsembles, FeatureMAP, FeatureWGD, FunctionWGD, Single, WeightWGD

H, C, POINTS = 8, 3, 60


def make_extractor() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, H))


def make_head() -> nn.Module:
    return nn.Linear(H, C)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(POINTS, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def fit(method, ens: ff.Ensemble, epochs: int = 3) -> ff.Ensemble:
    x, y = data()
    optimiser = torch.optim.SGD(ens.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    for _ in range(epochs):
        for batch in torch.arange(POINTS).split(20):
            optimiser.zero_grad()
            method.loss(ens, x[batch], y[batch]).loss.backward()
            optimiser.step()
    return ens


def build(method, members: int = 4, **options) -> ff.Ensemble:
    return method.build(make_extractor, make_head, members=members, train_size=POINTS, **options)


def test_members_of_deep_ensembles_equal_networks_trained_alone():
    seed = 3
    ens = fit(DeepEnsembles(), build(DeepEnsembles(), seed=seed))
    x, y = data()
    for i in range(4):
        # Alone, in plain PyTorch, without the library.
        torch.manual_seed(1000 * seed + i)
        net = nn.Sequential(make_extractor(), make_head())
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
        for _ in range(3):
            for batch in torch.arange(POINTS).split(20):
                optimiser.zero_grad()
                F.cross_entropy(net(x[batch]), y[batch]).backward()
                optimiser.step()
        member = nn.Sequential(ens.extractors[i], ens.head[i])
        for a, b in zip(net.state_dict().values(), member.state_dict().values(), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(net.eval()(x), member.eval()(x))


def test_single_is_the_first_member_of_deep_ensembles():
    one, many = fit(Single(), build(Single(), 1)), fit(DeepEnsembles(), build(DeepEnsembles()))
    assert torch.equal(one.eval()(data()[0])[0], many.eval()(data()[0])[0])


def test_all_methods_start_from_the_same_members():
    x, _ = data()
    reference = build(DeepEnsembles(), seed=7).eval().features(x)
    for method in (FeatureWGD(), FunctionWGD(), WeightWGD(), FeatureMAP(), ADP()):
        assert torch.equal(build(method, seed=7).eval().features(x), reference)
    assert torch.equal(build(FeatureWGD(), members=2, seed=7).eval().features(x), reference[:2])
    assert not torch.equal(build(FeatureWGD(), seed=8).eval().features(x)[0], reference[0])


def test_build_does_not_change_the_global_random_state():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    build(FeatureWGD())
    assert torch.equal(torch.rand(3), expected)


def test_defaults_are_those_of_the_paper():
    assert FeatureWGD() == FeatureWGD(ff.Cauchy(1e-3), ff.RBF("median"), 5, "dominant", ff.WGD())
    assert (FunctionWGD().prior, FunctionWGD().rank) == (ff.Cauchy(1e-6), 5)
    assert (WeightWGD().prior, WeightWGD().rank) == (ff.Normal(1e-3), 5)
    assert FeatureMAP().prior == ff.Cauchy(5e-3)
    make = (make_extractor, make_head)
    assert len(FeatureWGD().build(*make)) == len(DeepEnsembles().build(*make)) == 10
    assert len(Single().build(*make)) == len(FeatureMAP().build(*make)) == 1
    for method in METHODS:
        assert dataclasses.is_dataclass(method)
        with pytest.raises(dataclasses.FrozenInstanceError):
            method.prior = None


@pytest.mark.parametrize(("members", "rank"), [(10, 5), (4, 4), (3, 3), (1, 1)])
def test_rank_is_at_most_the_number_of_members(members, rank):
    assert build(FeatureWGD(), members).layer.rank == rank
    assert build(FeatureWGD(rank=None), members).layer.rank is None


def test_position_of_the_particle_layer():
    feature, function, weight = (build(m) for m in (FeatureWGD(), FunctionWGD(), WeightWGD()))
    assert isinstance(feature.head, nn.Linear)
    assert isinstance(function.head, nn.ModuleList)
    assert isinstance(weight.head, nn.ModuleList)
    assert (feature.at, function.at, weight.at) == ("features", "logits", "weights")
    assert weight.layer.count == POINTS
    assert build(DeepEnsembles()).layer is None


def test_function_wgd_repels_logits():
    method = FunctionWGD(ff.Normal(0.1), rank=2)
    ens = build(method)
    x, y = data()
    method.loss(ens, x, y).loss.backward()
    again = build(method)
    logits = again(x)
    g = torch.autograd.grad(-F.cross_entropy(logits.flatten(0, 1), y.repeat(4), reduction="sum"), logits)[0]
    again.layer = None
    logits = again(x)
    v = ff.transport(logits.detach().flatten(1), g.flatten(1), prior=ff.Normal(0.1), rank=2)
    # The layer behind the heads hands −v/B to the logits; g was taken behind it, so it is the plain gradient.
    logits.backward(-v.view_as(logits) / POINTS)
    for a, b in zip(ens.parameters(), again.parameters(), strict=True):
        assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_without_prior_and_repulsion_extractors_get_the_gradients_of_deep_ensembles():
    """FeatureMAP with a uniform prior: extractors as if trained alone, the shared head with the mean gradient."""
    method = FeatureMAP(ff.Uniform())
    ens = build(method)
    x, y = data()
    method.loss(ens, x, y).loss.backward()
    head_grads = []
    for i in range(4):
        torch.manual_seed(i)
        extractor = make_extractor()
        logits = ens.head(extractor(x))
        loss = F.cross_entropy(logits, y)
        *own, head_grad = torch.autograd.grad(loss, [*extractor.parameters(), ens.head.weight])
        head_grads.append(head_grad)
        for p, grad in zip(ens.extractors[i].parameters(), own, strict=True):
            assert_close(p.grad, grad, rtol=1e-4, atol=1e-6)
    assert_close(ens.head.weight.grad, sum(head_grads) / 4, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "method", [Single(), DeepEnsembles(), FeatureWGD(), FunctionWGD(), WeightWGD(), FeatureMAP(), ADP(), DICE()]
)
def test_every_method_learns(method):
    members = 1 if isinstance(method, Single) else 4
    ens = fit(method, build(method, members), epochs=40)
    x, y = data()
    assert (ens.predict(x).argmax(-1) == y).double().mean() > 0.9


def test_repulsion_keeps_features_apart():
    """The same members with and without repulsion, trained until they fit the data."""

    def spread(method) -> float:
        h = fit(method, build(method, seed=1), epochs=100).eval().features(data()[0]).detach().flatten(1)
        return float(torch.pdist(h).mean() / h.norm(dim=1).mean())

    prior = ff.Cauchy(1e-2)
    assert spread(FeatureWGD(prior)) > 1.1 * spread(FeatureMAP(prior))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="needs train_size"):
        WeightWGD().build(make_extractor, make_head, members=3)
    with pytest.raises(ValueError, match="Single trains one network"):
        build(Single(), 3)
    with pytest.raises(ValueError, match="1 to 1,000 members"):
        build(DeepEnsembles(), 0)
    with pytest.raises(ValueError, match="seed from 0"):
        build(DeepEnsembles(), 2, seed=-1)
    net = make_extractor()
    with pytest.raises(ValueError, match="same extractor was given twice"):
        DeepEnsembles().build(lambda: net, make_head, members=2)
