"""Losses, likelihoods and counts of every task, against naive loops and PyTorch's own losses."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal
from torch.testing import assert_close

import featureflock as ff
from featureflock.methods import ADP, DICE, DeepEnsembles, FeatureMAP, FeatureWGD, FunctionWGD, Single, WeightWGD
from featureflock.tasks import Classification, HeteroscedasticRegression, MultiLabel, Regression

N, B = 3, 5


def case(name):
    """Task, outputs (n, B, …), targets and log-variance."""
    g = torch.Generator().manual_seed(3)

    def rand(*shape):
        return 2 * torch.randn(*shape, generator=g, dtype=torch.float64)

    labels = torch.randint(4, (B,), generator=g)
    pixels = torch.randint(4, (B, 3, 2), generator=g)
    match name:
        case "classes":
            return Classification(), rand(N, B, 4), labels, None
        case "pixels":
            return Classification(), rand(N, B, 4, 3, 2), pixels, None
        case "tokens":
            return Classification(dim=-1), rand(N, B, 6, 4), torch.randint(4, (B, 6), generator=g), None
        case "ignored":
            pixels[0] = 255
            return Classification(ignore_index=255), rand(N, B, 4, 3, 2), pixels, None
        case "labels":
            return MultiLabel(), rand(N, B, 4), torch.randint(2, (B, 4), generator=g).double(), None
        case "fixed":
            return Regression(variance=0.3), rand(N, B, 2), rand(B, 2), None
        case "shared":
            return Regression(), rand(N, B, 2), rand(B, 2), torch.tensor(-0.7, dtype=torch.float64)
        case "each":
            return Regression(), rand(N, B, 1), rand(B), torch.tensor([-0.7, 0.2, 1.0], dtype=torch.float64)
        case "standardised":
            task = replace(Regression(variance=0.3), target_mean=(3.0, -1.0), target_std=(2.0, 0.5))
            return task, rand(N, B, 2), rand(B, 2), None
        case "by-input":
            return HeteroscedasticRegression(), rand(N, B, 4), rand(B, 2), None


CASES = ["classes", "pixels", "tokens", "ignored", "labels", "fixed", "shared", "each", "standardised", "by-input"]


def naive_log_likelihoods(name, task, outputs, y, log_variance):
    """log p(y_t | f_i) of each member and target, in a loop over members, in standardised units for regression."""
    each = []
    for i, f in enumerate(outputs):
        if isinstance(task, Classification):
            logits = f if name == "tokens" else f.movedim(1, -1)
            keep = y != (-1 if task.ignore_index is None else task.ignore_index)
            each.append(Categorical(logits=logits).log_prob(y.where(keep, 0))[keep])
        elif isinstance(task, MultiLabel):
            each.append(Bernoulli(logits=f).log_prob(y))
        else:
            mean, variance = f, torch.full_like(f, task.variance) if getattr(task, "variance", None) else None
            if isinstance(task, HeteroscedasticRegression):
                mean, variance = f[:, :2], (20 * torch.tanh(f[:, 2:] / 20)).exp()
            elif log_variance is not None:
                variance = (log_variance if log_variance.ndim == 0 else log_variance[i]).exp().expand_as(f)
            target = y.reshape(mean.shape)
            if task.target_std:
                target = (target - torch.tensor(task.target_mean)) / torch.tensor(task.target_std)
            each.append(Normal(mean, variance.sqrt()).log_prob(target))
    return torch.stack([part.flatten() for part in each])


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_the_mean_of_a_naive_loop(name):
    task, outputs, y, log_variance = case(name)
    log_p = naive_log_likelihoods(name, task, outputs, y, log_variance)
    assert_close(task.losses(outputs, y, log_variance), -log_p.mean(1))
    assert_close(task.loss(outputs, y, log_variance), -log_p.mean())
    assert int(task.count(y)) == log_p.shape[1]


@pytest.mark.parametrize("name", [n for n in CASES if n != "standardised"])
def test_the_nll_is_that_of_the_mixture(name):
    task, outputs, y, log_variance = case(name)
    log_p = naive_log_likelihoods(name, task, outputs, y, log_variance)
    nll = task.nll(task.member_predictions(outputs, log_variance), y).flatten()
    if name == "ignored":
        assert (nll == 0).sum() >= 6
        nll = nll[(y != 255).flatten()]
    assert_close(nll, -(log_p.exp().mean(0)).log())


def test_standardised_predictions_are_in_the_unit_of_the_targets():
    task, outputs, y, _ = case("standardised")
    members = task.member_predictions(outputs)
    mean, std = torch.tensor(task.target_mean), torch.tensor(task.target_std)
    naive = Normal(mean + std * outputs, std * math.sqrt(0.3)).log_prob(y).exp().mean(0).log()
    assert_close(task.nll(members, y), -naive)
    assert_close(task.predict(members).mean, mean + std * outputs.mean(0))
    fitted = Regression().fitted(y)
    assert fitted.target_mean == pytest.approx(y.mean(0).tolist())
    assert fitted.target_std == pytest.approx(y.std(0, correction=0).tolist())
    assert fitted.fitted(100 * y) == fitted


def ensemble(task, method, outputs, *, seed=0, train_size=40, dense=False):
    def make_extractor():
        if dense:
            return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh())
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh())

    def make_head():
        return nn.Conv2d(4, outputs, 1) if dense else nn.Linear(4, outputs)

    members = 1 if isinstance(method, Single) else 3
    return method.build(
        make_extractor, make_head, members=members, seed=seed, train_size=train_size, task=task
    ).double()


METHODS = [Single(), DeepEnsembles(), FeatureWGD(rank=None), FeatureMAP(), FunctionWGD(rank=None), WeightWGD(rank=None)]
DATA = {
    "regression": (Regression(), 1, lambda: torch.randn(8).double()),
    "fixed": (Regression(variance=0.5), 2, lambda: torch.randn(8, 2).double()),
    "by-input": (HeteroscedasticRegression(), 2, lambda: torch.randn(8).double()),
    "labels": (MultiLabel(), 3, lambda: torch.randint(2, (8, 3))),
    "classes": (Classification(), 3, lambda: torch.randint(3, (8,))),
    "pixels": (Classification(), 3, lambda: torch.randint(3, (8, 5, 4))),
}


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("name", DATA)
def test_every_method_learns_every_task(name, method):
    torch.manual_seed(0)
    task, outputs, targets = DATA[name]
    y, dense = targets(), name == "pixels"
    ens = ensemble(task, method, outputs, dense=dense, train_size=y.numel())
    x = torch.randn(8, 1, 5, 4).double() if dense else torch.randn(8, 6).double()
    optimiser = torch.optim.SGD(ens.parameters(), lr=0.1)
    losses = []
    for _ in range(30):
        optimiser.zero_grad()
        loss, out = method.loss(ens, x, y)
        loss.backward()
        optimiser.step()
        losses.append(
            float(task.loss(out.detach(), y, None if ens.log_variance is None else ens.log_variance.detach()))
        )
    assert losses[-1] < losses[0]
    ens.eval()
    assert all(torch.isfinite(part).all() for part in ens.uncertainty(x))


@pytest.mark.parametrize("name", ["pixels", "labels"])
def test_the_layer_takes_its_count_from_the_task(name):
    """The update is that of the sum of all log-likelihood terms, and an explicit count is used instead."""
    torch.manual_seed(1)
    task, outputs, targets = DATA[name]
    y, dense = targets(), name == "pixels"
    x = torch.randn(8, 1, 5, 4).double() if dense else torch.randn(8, 6).double()

    def gradient(count, inner):
        ens = ensemble(task, FeatureWGD(rank=None), outputs, dense=dense)
        ens.layer.count = count
        if inner:
            ens.layer.count = None
        FeatureWGD(rank=None).loss(ens, x, y).loss.backward()
        return torch.cat([p.grad.flatten() for p in ens.extractors.parameters()])

    assert_close(gradient(None, True), gradient(y.numel(), False))
    assert not torch.allclose(gradient(None, True), gradient(8, False))

    # By transport on the features, with the gradient of the summed log-likelihood.
    ens = ensemble(task, FeatureWGD(rank=None), outputs, dense=dense)
    h = ens.features(x).detach().requires_grad_()
    log_lik = -task.losses(ens.logits(h), y).sum() * y.numel()
    (g,) = torch.autograd.grad(log_lik, h)
    v = ff.transport(h.detach().flatten(1), g.flatten(1), prior=FeatureWGD().prior, rank=None).view_as(h)
    ens.zero_grad()
    ens.features(x).backward(-v / y.numel())
    assert_close(gradient(None, True), torch.cat([p.grad.flatten() for p in ens.extractors.parameters()]))


def test_a_learnt_variance_follows_the_heads():
    shared, each = (ensemble(Regression(), method, 1) for method in (FeatureWGD(), DeepEnsembles()))
    assert shared.log_variance.shape == ()
    assert each.log_variance.shape == (3,)
    assert ensemble(Regression(variance=1.0), DeepEnsembles(), 1).log_variance is None
    assert "log_variance" in dict(shared.named_parameters())


@pytest.mark.parametrize("method", [DeepEnsembles(), FunctionWGD(rank=None), WeightWGD(rank=None)], ids=repr)
def test_variances_of_single_members_learn_as_in_separate_training(method):
    torch.manual_seed(2)
    x, y = torch.randn(8, 6).double(), torch.randn(8, 1).double()
    ens = ensemble(Regression(), method, 1)
    with torch.no_grad():
        ens.log_variance.copy_(torch.tensor([-1.0, 0.0, 1.0]))
    loss, outputs = method.loss(ens, x, y)
    loss.backward()
    for i in range(3):
        r2, variance = (outputs[i].detach() - y).square().mean(), ens.log_variance[i].detach().exp()
        assert_close(ens.log_variance.grad[i], (1 - r2 / variance) / 2)


def test_a_shared_variance_gets_the_mean_gradient_and_its_optimum_is_the_mean_squared_error():
    torch.manual_seed(2)
    x, y = torch.randn(8, 6).double(), torch.randn(8, 1).double()
    ens, method = ensemble(Regression(), FeatureWGD(rank=None), 1), FeatureWGD(rank=None)
    with torch.no_grad():
        ens.log_variance.copy_((ens(x) - y).square().mean().log())
    method.loss(ens, x, y).loss.backward()
    assert_close(ens.log_variance.grad, torch.zeros_like(ens.log_variance))


@pytest.mark.parametrize("method", [ADP(), DICE()], ids=repr)
def test_methods_of_classes_refuse_other_tasks(method):
    for task in (Regression(), MultiLabel(), HeteroscedasticRegression()):
        with pytest.raises(ValueError, match=f"{method.title} is defined for one class per example only, not for"):
            ensemble(task, method, 2)
    ens = ensemble(Classification(), method, 3)
    with pytest.raises(ValueError, match=r"not for targets of shape \(8, 5, 4\)"):
        method.loss(ens, torch.randn(8, 6).double(), torch.zeros(8, 5, 4, dtype=torch.int64))


WRONG = {
    "one output": (Classification(), (3, 8, 1), torch.zeros(8).long(), "at least two classes, but there is one output"),
    "float labels": (
        Classification(),
        (3, 8, 4),
        torch.zeros(8),
        "integer class indices as targets, got torch.float32",
    ),
    "bool labels": (Classification(), (3, 8, 4), torch.zeros(8).bool(), "integer class indices"),
    "no classes": (Classification(), (3, 8), torch.zeros(8).long(), r"needs outputs \(members, examples, classes"),
    "one-hot": (Classification(), (3, 8, 4), torch.zeros(8, 4).long(), r"needs targets of shape \(8,\)"),
    "tokens": (Classification(), (3, 8, 6, 4), torch.zeros(8, 6).long(), r"use Classification\(dim=-1\)"),
    "class 4": (Classification(), (3, 8, 4), torch.full((8,), 4), "must be 0 to 3 for 4 outputs; got 4"),
    "class -1": (Classification(), (3, 8, 4), torch.full((8,), -1), "must be 0 to 3 for 4 outputs; got -1"),
    "swapped": (Classification(), (8, 3, 4), torch.zeros(8).long(), r"torch.stack\(members, 0\)"),
    "swapped numbers": (Regression(variance=1.0), (8, 3, 1), torch.zeros(8), r"torch.stack\(members, 0\)"),
    "indices": (MultiLabel(), (3, 8, 4), torch.zeros(8).long(), r"class indices belong to tasks.Classification\(\)"),
    "values": (MultiLabel(), (3, 8, 4), torch.full((8, 4), 2), r"some are outside of \[0, 1\]"),
    "broadcast": (Regression(variance=1.0), (3, 8, 4), torch.zeros(8), r"targets of shape \(8, 4\)"),
    "broadcast 1": (Regression(variance=1.0), (3, 8), torch.zeros(8, 8), r"targets of shape \(8,\)"),
    "nan": (Regression(variance=1.0), (3, 8, 1), torch.full((8,), math.nan), "some are NaN or infinite"),
    "odd": (HeteroscedasticRegression(), (3, 8, 3), torch.zeros(8), "D means, then D log-variances"),
    "list": (Regression(variance=1.0), (3, 8, 1), [0.0] * 8, "targets as a tensor; got list"),
    "learnt": (Regression(), (3, 8, 1), torch.zeros(8), "pass ens.log_variance, or fix"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_belong_to_the_task_is_refused(name):
    task, shape, y, message = WRONG[name]
    for function in (task.loss, task.losses):
        with pytest.raises(ValueError, match=message):
            function(torch.zeros(shape), y)


def test_features_with_the_batch_first_are_refused():
    ens = ensemble(Classification(), FeatureWGD(), 3)
    with pytest.raises(
        ValueError, match=r"Features must have shape \(3, examples, …\), members first; got \(8, 3, 4\)"
    ):
        ens.logits(torch.zeros(8, 3, 4).double())


def test_the_default_task_refuses_to_predict_from_one_output():
    ens = ff.Ensemble([nn.Linear(6, 4) for _ in range(3)], nn.Linear(4, 1))
    for function in (ens.predict, ens.uncertainty):
        with pytest.raises(ValueError, match=r"use tasks.Regression\(\) for numbers"):
            function(torch.zeros(5, 6))


def test_nothing_is_read_from_a_device():
    """Meta tensors have no values, so reading one would fail."""
    for name in CASES:
        task, outputs, y, log_variance = case(name)
        noise = None if log_variance is None else log_variance.to("meta")
        assert task.loss(outputs.to("meta"), y.to("meta"), noise).is_meta


def test_targets_of_one_number_do_not_broadcast():
    task, outputs, y, log_variance = case("each")
    assert_close(task.loss(outputs, y, log_variance), task.loss(outputs, y[:, None], log_variance))
    assert_close(task.loss(outputs[..., 0], y, log_variance), task.loss(outputs, y, log_variance))


def test_binary_cross_entropy_is_the_reference_of_labels():
    task, outputs, y, _ = case("labels")
    assert_close(task.loss(outputs, y.long()), F.binary_cross_entropy_with_logits(outputs, y.expand_as(outputs)))
