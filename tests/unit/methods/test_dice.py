"""DICE: the terms of its loss, the separation of members and discriminators, and its effect on redundancy."""

import copy
import math
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from helpers.short_runs import SHORT, same, weights
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

import featureflock as ff
from featureflock.evaluation import conditional_redundancy
from featureflock.methods import DICE, DeepEnsembles, Method
from featureflock.methods.dice import in_pairs, kl, moments
from featureflock.methods.discriminators import discriminate
from featureflock.training import train

N, B, H, C, POINTS = 3, 24, 4, 3, 120


def make_extractor() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, H))


def make_head() -> nn.Module:
    return nn.Linear(H, C)


def build(method: Method, members: int = N, **options) -> ff.Ensemble:
    return method.build(make_extractor, make_head, members=members, train_size=POINTS, **options)


def sample(b: int = B, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs with two views of the class, four numbers each, with independent noise."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(C, (b,), generator=generator)
    x = torch.randn(b, 8, generator=generator) + 2 * F.one_hot(y, 4).repeat(1, 2)
    return x, y


def fit(method: Method, ens: ff.Ensemble, steps: int, seed: int = 0) -> ff.Ensemble:
    torch.manual_seed(seed)
    optimisers = method.optimisers(ens, lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    for step in range(steps):
        for optimiser in optimisers:
            optimiser.zero_grad()
        method.loss(ens, *sample(128, 1000 * seed + step)).loss.backward()
        for optimiser in optimisers:
            optimiser.step()
    return ens.eval()


@lru_cache
def _trained_once(members: int) -> ff.Ensemble:
    method = DICE(delta=0.0, ramp_epochs=0.0, initial_beta=10.0, beta=10.0)
    return fit(method, build(method, members), 60).train()


def trained(members: int = N) -> ff.Ensemble:
    """An ensemble without initial values, whose discriminators have learnt something."""
    return copy.deepcopy(_trained_once(members))


def test_the_divergence_is_that_of_torch_distributions():
    generator = torch.Generator().manual_seed(0)
    mean_e, log_e, mean_b, log_b = 2 * torch.randn(4, 5, 7, generator=generator, dtype=torch.float64)
    e, b = Normal(mean_e, (log_e / 2).exp()), Normal(mean_b, (log_b / 2).exp())
    assert_close(kl(mean_e, log_e, mean_b, log_b), kl_divergence(e, b).sum(-1))
    assert (kl(mean_e, log_e, mean_e, log_e) == 0).all()


def test_initial_members_are_those_of_all_other_methods():
    x, _ = sample()
    ens, plain = build(DICE(), seed=7), build(DeepEnsembles(), seed=7)
    assert torch.equal(ens.eval()(x), plain.eval()(x))
    assert torch.equal(ens.features(x)[..., :H], plain.features(x))
    assert same(dict(build(DICE(), seed=7).state_dict()), dict(ens.state_dict()))
    other = build(DICE(), seed=8)
    assert not torch.equal(other.layer.discriminators.embedding, ens.layer.discriminators.embedding)


def test_features_are_gaussian_in_training_and_their_mean_afterwards():
    ens = trained(1)
    x = sample(1)[0].expand(20_000, -1)
    gaussian = ens.features(x)
    mean, log_variance = moments(gaussian[:, 0])
    z = ens.layer(gaussian)
    assert z.shape == (1, 20_000, H)
    assert_close(z.mean(1), mean, rtol=0, atol=0.05)
    assert_close(z.var(1), log_variance.exp(), rtol=0.05, atol=0)
    assert (torch.corrcoef(z[0].T) - torch.eye(H)).abs().max() < 0.05
    assert_close(ens.eval()(x[:1])[0], ens.head[0][1](mean))


def test_the_loss_follows_its_formula():
    method = DICE(delta=0.7, beta=20.0, ramp_epochs=0.0, tau=5.0)
    ens = trained().double()
    x, y = sample()
    x = x.double()
    torch.manual_seed(1)
    terms, _ = method.terms(ens, x, y)
    torch.manual_seed(1)
    noise = torch.randn(N, B, H, dtype=torch.float64)
    mean, log_variance = moments(torch.stack([extractor(x) for extractor in ens.extractors]))
    z = mean + (log_variance / 2).exp() * noise
    cross_entropy, bottleneck = 0.0, 0.0
    for i in range(N):
        cross_entropy += F.cross_entropy(ens.head[i][1](z[i]), y)
        mean_b, log_b = moments(ens.layer.class_gaussians[i, y])
        e, b = Normal(mean[i], (log_variance[i] / 2).exp()), Normal(mean_b, (log_b / 2).exp())
        bottleneck += kl_divergence(e, b).sum(-1).mean() / 20
    estimate = discriminate(ens.layer.discriminators, z, y)
    assert_close(terms.cross_entropy, cross_entropy)
    assert_close(terms.bottleneck, bottleneck)
    redundancy = sum(max(0.0, each) for each in estimate.information(5.0).tolist())
    assert redundancy > 0
    assert terms.redundancy.item() == pytest.approx(0.7 / (N - 1) * redundancy)
    assert_close(terms.discrimination, estimate.discrimination().sum())
    torch.manual_seed(1)
    assert_close(method.loss(ens, x, y).loss, sum(terms))


def test_losses_of_members_and_discriminators_are_separate():
    method = DICE(ramp_epochs=0.0)
    ens = trained()
    terms, _ = method.terms(ens, *sample())
    adversaries = list(ens.layer.discriminators.parameters())
    members = [p for p in ens.parameters() if not any(p is q for q in adversaries)]
    of_members = terms.cross_entropy + terms.bottleneck + terms.redundancy

    def gradients(loss, parameters):
        return torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)

    assert all(g is None for g in gradients(of_members, adversaries))
    assert all(g is None for g in gradients(terms.discrimination, members))
    # The redundancy reaches all extractors, and the discrimination all discriminators.
    assert terms.redundancy > 0
    reached = gradients(terms.redundancy, list(ens.extractors.parameters()))
    assert all(g is not None and g.abs().sum() > 0 for g in reached)
    assert all(g is not None and g.abs().sum() > 0 for g in gradients(terms.discrimination, adversaries))
    # So one backward pass of the sum gives both gradients.
    total = gradients(sum(terms), [*members, *adversaries])
    alone = (*gradients(of_members, members), *gradients(terms.discrimination, adversaries))
    for a, b in zip(total, alone, strict=True):
        assert_close(a, b)


def test_a_negative_estimate_gives_no_gradient():
    """Information is non-negative: where the estimate is negative, the redundancy and its gradient are zero."""
    method = DICE(ramp_epochs=0.0)
    ens = trained(2)
    x, y = sample(128)
    assert method.terms(ens, x, y)[0].redundancy > 0.05
    with torch.no_grad():
        for p in (ens.layer.discriminators.weights[-1], ens.layer.discriminators.biases[-1]):
            p.neg_()  # inverts what they have learnt
    terms, _ = method.terms(ens, x, y)
    assert discriminate(ens.layer.discriminators, ens.layer(ens.features(x)), y).information().item() < -0.1
    assert terms.redundancy == 0
    assert all((g == 0).all() for g in torch.autograd.grad(terms.redundancy, list(ens.extractors.parameters())))


def test_weights_of_the_terms_rise_over_the_first_epochs():
    method = DICE(delta=0.4, beta=1000.0, initial_beta=10.0, ramp_epochs=2.0)
    for epochs, delta, beta in (
        (0.0, 0.0, 10.0),
        (0.5, 0.1, 10**1.5),
        (1.0, 0.2, 100.0),
        (2.0, 0.4, 1e3),
        (9.0, 0.4, 1e3),
    ):
        found = method.weights_after(torch.tensor(epochs))
        assert [float(value) for value in found] == pytest.approx([delta, beta], rel=1e-5)
    assert [float(v) for v in replace(method, ramp_epochs=0.0).weights_after(torch.tensor(0.0))] == [
        pytest.approx(0.4),
        1000.0,
    ]
    ens = build(method)
    x, y = sample()
    for batch in range(5):
        assert float(ens.layer.epochs) == pytest.approx(batch * B / POINTS)
        method.loss(ens, x, y)
    with torch.no_grad():
        method.loss(ens, x, y)
    ens.eval()
    method.loss(ens, x, y)
    assert float(ens.layer.epochs) == pytest.approx(1.0)  # only training steps count


def test_discriminators_have_their_own_optimiser_and_learning_rate():
    method = DICE(discriminator_learning_rate=3e-4)
    ens = build(method)
    optimiser, of_classes = method.extra_optimisers(ens)
    assert [type(o) for o in (optimiser, of_classes)] == [torch.optim.RMSprop, torch.optim.Adam]
    assert [(group["params"], group["lr"]) for group in of_classes.param_groups] == [
        ([ens.layer.class_gaussians], 0.05)
    ]
    assert [group["lr"] for group in optimiser.param_groups] == [3e-4]
    trained = {p for group in optimiser.param_groups for p in group["params"]}
    assert trained == set(ens.layer.discriminators.parameters())
    for p in trained:
        p.grad = 100 * torch.ones_like(p)
    for p in trained:
        p.grad[0] = 1e-6
    before = [p.grad[0].clone() for p in trained]
    optimiser.step()
    norms = torch.stack([p.grad.flatten(1).square().sum(1) for p in trained]).sum(0).sqrt()
    assert_close(norms[1:], torch.ones(2))
    assert all(torch.equal(p.grad[0], g) for p, g in zip(trained, before, strict=True))
    sgd, *_ = method.optimisers(ens, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    others = {p for group in sgd.param_groups for p in group["params"]}
    assert others | trained | {ens.layer.class_gaussians} == set(ens.parameters())
    assert not others & trained
    assert DeepEnsembles().extra_optimisers(build(DeepEnsembles())) == []


def test_class_gaussians_fit_the_features():
    """Training brings the bottleneck close to the optimum of one Gaussian per class, unlike one for all classes."""
    method = DICE()
    ens = fit(method, build(method, 2), 140)
    x, y = sample(4_000, 10**6)
    with torch.no_grad():
        mean, log_variance = moments(ens.features(x))
        divergence = ens.layer.divergence(ens.features(x), y).mean(1)
        best = torch.zeros(2)
        for label in range(C):
            of_class = y == label
            centre = mean[:, of_class].mean(1, keepdim=True)
            variance = ((mean[:, of_class] - centre).square() + log_variance[:, of_class].exp()).mean(1, keepdim=True)
            best += kl(mean[:, of_class], log_variance[:, of_class], centre, variance.log()).sum(1) / len(y)
        centre = mean.mean(1, keepdim=True)
        variance = ((mean - centre).square() + log_variance.exp()).mean(1, keepdim=True)
        one_for_all = kl(mean, log_variance, centre, variance.log()).mean(1)
    assert (divergence >= best - 1e-3).all()
    assert (divergence - best < 0.5 * (one_for_all - best)).all()


def test_training_makes_members_less_redundant_and_no_worse():
    x, y = sample(2_000, 10**6)
    redundancy, accuracy = [], []
    for delta in (0.0, 0.2):
        method = DICE(delta=delta, ramp_epochs=5.0)
        ens = fit(method, build(method, 2), 110)
        with torch.no_grad():
            redundancy.append(conditional_redundancy(ens.features(x)[..., :H], y, steps=60)[0, 1].item())
        accuracy.append((ens.predict(x).argmax(-1) == y).double().mean().item())
    assert redundancy[0] > 1.5
    assert redundancy[1] < 0.4 * redundancy[0]
    assert accuracy[1] > accuracy[0] - 0.01


@pytest.mark.parametrize("execution", ["vectorised", "low_memory"])
def test_all_execution_modes_give_the_same_gradients(execution):
    method = DICE(ramp_epochs=0.0)
    x, y = sample()
    gradients = []
    ens = trained().double()
    for way in ("sequential", execution):
        ens.execution = way
        ens.zero_grad()
        torch.manual_seed(2)
        method.loss(ens, x.double(), y).loss.backward()
        gradients.append([p.grad for p in ens.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert_close(a, b)


def test_a_loaded_ensemble_predicts_and_trains_identically(tmp_path):
    method = DICE()
    ens = fit(method, build(method), 5).train()
    ff.save(ens, tmp_path)
    loaded = ff.load(tmp_path)
    x, y = sample()
    assert same(dict(loaded.state_dict()), dict(ens.state_dict()))
    assert torch.equal(loaded.predict(x), ens.predict(x))
    losses = []
    for each in (ens, loaded):
        torch.manual_seed(3)
        losses.append(method.loss(each, x, y).loss)
    assert torch.equal(*losses)
    assert int(loaded.layer.seen) == 5 * 128 + B


@pytest.mark.parametrize("labels", [torch.arange(40) % 7, torch.arange(12), torch.tensor([0, 0, 0, 1, 2, 2])])
def test_pairs_of_a_class_stay_together(labels):
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    order = in_pairs(shuffled, labels)
    assert sorted(order.tolist()) == list(range(len(labels)))
    paired = sum(int(size) // 2 for size in torch.bincount(labels))
    found = labels[order]
    assert torch.equal(found[0 : 2 * paired : 2], found[1 : 2 * paired : 2])
    assert len(set(found[2 * paired :].tolist())) == len(found) - 2 * paired
    # The first of each pair, and all examples of each class, keep the random order.
    place = torch.empty_like(shuffled)
    place[shuffled] = torch.arange(len(labels))
    firsts = place[order[0 : 2 * paired : 2]]
    assert torch.equal(firsts, firsts.sort().values)
    for label in labels.unique():
        assert torch.equal(order[found == label], shuffled[labels[shuffled] == label])
    assert torch.equal(DICE(paired_batches=True).order(shuffled, labels), order)
    assert torch.equal(DICE().order(shuffled, labels), shuffled)


def test_it_trains_in_half_precision():
    method = DICE(ramp_epochs=0.0)
    x, y = sample()
    ens = build(method).bfloat16()
    method.loss(ens, x.bfloat16(), y).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in ens.parameters())
    ens = build(method)
    with torch.autocast("cpu", torch.bfloat16):
        loss = method.loss(ens, x, y).loss
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(torch.isfinite(p.grad).all() for p in ens.parameters())


def test_one_member_is_a_bottleneck_without_redundancy():
    method = DICE(ramp_epochs=0.0)
    ens = build(method, 1)
    terms, _ = method.terms(ens, *sample())
    assert (terms.redundancy, terms.discrimination) == (0, 0)
    fit(method, ens, 3)


def test_batches_without_pairs_and_huge_features_give_finite_losses(tmp_path):
    """No class has two examples in a batch, and features are so large that members are certain."""
    method = DICE(ramp_epochs=0.0)
    ens = build(method)
    loss = method.loss(ens, 1e4 * sample(C)[0], torch.arange(C)).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in ens.parameters() if p.grad is not None)
    result = train(replace(SHORT, method=DICE(), batch=2, epochs=1, subset=40, learning_rate=0.01), tmp_path)
    assert math.isfinite(result["test"]["nll"])


def test_paired_batches_reach_the_training_loop(tmp_path):
    recipe = replace(SHORT, method=DICE(), epochs=1, batch=4)
    train(recipe, tmp_path / "plain")
    train(replace(recipe, method=DICE(paired_batches=True)), tmp_path / "paired")
    assert not same(weights(tmp_path / "plain"), weights(tmp_path / "paired"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DICE(delta=-1.0), "delta must be a finite number of at least 0"),
        (lambda: DICE(ramp_epochs=math.nan), "ramp_epochs must be a finite number"),
        (lambda: DICE(beta=0.0), "beta must be a finite number above 0"),
        (lambda: DICE(initial_beta=math.inf), "initial_beta must be a finite number above 0"),
        (lambda: DICE(tau=-1.0), "tau must be a finite number above 0"),
        (lambda: DICE(discriminator_learning_rate=0.0), "discriminator_learning_rate must be a finite number above 0"),
        (lambda: DICE().build(make_extractor, make_head, members=2), "DICE needs train_size=N"),
        (lambda: DICE().build(make_extractor, nn.Identity, members=2, train_size=9), "nn.Linear heads"),
        (
            lambda: DICE().build(make_extractor, lambda: nn.LazyLinear(3), members=2, train_size=9),
            "nn.Linear heads",
        ),
        (lambda: DICE().loss(build(DeepEnsembles()), *sample()), "built by DICE.build"),
        (lambda: DICE().build(nn.Identity, make_head, train_size=9)(torch.zeros(2, 3, H)), r"return \(examples, 4\)"),
        (lambda: DICE().build(nn.Identity, make_head, train_size=9)(torch.zeros(2, 3)), r"got \(2, 3\)"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
