"""ADP against its formula, finite differences, and two limits in closed form."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import featureflock as ff
from featureflock.methods import ADP
from featureflock.methods.adp import log_volume, mean_entropy

N, B, C = 3, 6, 5


def members(dtype=torch.float64, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(N, B, C, generator=generator, dtype=torch.float64)
    return logits.to(dtype).requires_grad_(), torch.randint(C, (B,), generator=generator)


def as_ensemble(logits: torch.Tensor) -> ff.Ensemble:
    """An ensemble whose members return these logits for any input."""

    class Constant(nn.Module):
        def __init__(self, values):
            super().__init__()
            self.values = nn.Parameter(values.detach().clone())

        def forward(self, x):
            return self.values

    return ff.Ensemble([Constant(each) for each in logits], [nn.Identity() for _ in logits])


def naive(logits: torch.Tensor, y: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    """The loss by its definition, example by example, from probabilities."""
    total = torch.zeros((), dtype=logits.dtype)
    p = logits.softmax(-1)
    for b, label in enumerate(y.tolist()):
        total = total - sum(p[i, b, label].log() for i in range(len(p)))
        mean = p[:, b].mean(0)
        total = total + alpha * (mean * (mean + 1e-20).log()).sum()
        rows = torch.stack([torch.cat([row[:label], row[label + 1 :]]) for row in p[:, b]])
        rows = rows / rows.norm(dim=1, keepdim=True)
        total = total - beta * torch.logdet(rows @ rows.T + 1e-6 * torch.eye(len(p), dtype=p.dtype))
    return total / len(y)


@pytest.mark.parametrize(("alpha", "beta"), [(2.0, 0.5), (0.0, 0.0), (1.0, 0.0), (0.0, 1.0)])
def test_the_loss_and_its_gradient_follow_the_formula(alpha, beta):
    logits, y = members()
    ens = as_ensemble(logits)
    loss = ADP(alpha, beta).loss(ens, torch.empty(B, 1), y).loss
    expected = naive(logits, y, alpha, beta)
    assert_close(loss, expected)
    loss.backward()
    (gradient,) = torch.autograd.grad(expected, logits)
    assert_close(torch.stack([e.values.grad for e in ens.extractors]), gradient)


def test_defaults_are_the_authors_and_zero_weights_give_deep_ensembles():
    assert (ADP().alpha, ADP().beta) == (2.0, 0.5)
    logits, y = members()
    plain = sum(F.cross_entropy(each, y) for each in logits)
    assert_close(ADP(0.0, 0.0).loss(as_ensemble(logits), torch.empty(B, 1), y).loss, plain)


def test_gradients_match_finite_differences():
    logits, y = members()
    assert torch.autograd.gradcheck(mean_entropy, logits)
    assert torch.autograd.gradcheck(lambda z: log_volume(z, y), logits)
    near = (logits[:1] + 0.01 * logits).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: log_volume(z, y), near, eps=1e-7, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_identical_members_give_the_closed_form(dtype):
    logits, y = members(dtype)
    same = logits[:1].expand(N, -1, -1).detach().clone().requires_grad_()
    expected = math.log(N + 1e-6) + (N - 1) * math.log(1e-6)
    volume = log_volume(same, y)
    assert_close(volume, torch.full_like(volume, expected), rtol=1e-9, atol=0)
    volume.sum().backward()
    assert torch.isfinite(same.grad).all()


def test_orthogonal_predictions_give_the_closed_form():
    y = torch.zeros(B, dtype=torch.long)
    logits = torch.full((N, B, C), -1e4)
    for i in range(N):
        logits[i, :, i + 1] = 0.0
    volume = log_volume(logits, y)
    assert_close(volume, torch.full_like(volume, N * math.log1p(1e-6)), rtol=1e-6, atol=0)
    # Nothing is further apart, and nothing closer than members in agreement.
    other, labels = members()
    assert (log_volume(other, labels) < volume.max()).all()
    assert (log_volume(other, labels) > math.log(N + 1e-6) + (N - 1) * math.log(1e-6)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_volume_does_not_depend_on_the_true_class(dtype):
    logits, y = members(dtype)
    certain = logits.detach().clone()
    certain[0, torch.arange(B), y] += 500  # in float64, too, all other probabilities are now zero
    certain.requires_grad_()
    assert (certain[0].softmax(-1)[torch.arange(B), y] == 1).all()
    volume, usual = log_volume(certain, y), log_volume(logits, y)
    assert_close(volume, usual)
    gradient, expected = torch.autograd.grad(volume.sum(), certain)[0], torch.autograd.grad(usual.sum(), logits)[0]
    assert_close(gradient, expected)
    assert (gradient[:, torch.arange(B), y] == 0).all()


def test_extreme_logits_give_finite_gradients():
    y = torch.zeros(B, dtype=torch.long)
    for winner in (0, 1):
        ens = as_ensemble(torch.zeros(N, B, C).index_fill(2, torch.tensor([winner]), 1e4))
        loss = ADP().loss(ens, torch.empty(B, 1), y).loss
        loss.backward()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(e.values.grad).all() for e in ens.extractors)


def test_a_masked_class_has_no_effect():
    """A logit of −∞."""
    logits, y = members()
    with torch.no_grad():
        logits[:, torch.arange(B), (y + 1) % C] = -math.inf
    found = mean_entropy(logits)
    p = logits.softmax(-1).mean(0)
    assert_close(found, torch.special.entr(p).sum(-1))
    (gradient,) = torch.autograd.grad(found.sum() + log_volume(logits, y).sum(), logits)
    assert torch.isfinite(gradient).all()


def test_more_members_than_wrong_classes_and_one_member_are_allowed():
    y = torch.zeros(2, dtype=torch.long)
    two_classes = log_volume(torch.randn(4, 2, 2), y)  # one wrong class: all rows are the same
    assert_close(two_classes, torch.full_like(two_classes, math.log(4 + 1e-6) + 3 * math.log(1e-6)), rtol=1e-9, atol=0)
    one = log_volume(torch.randn(1, 2, 7), y)
    assert_close(one, torch.full_like(one, math.log1p(1e-6)), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_invalid_weights_are_refused(value):
    with pytest.raises(ValueError, match="alpha must be a finite number of at least 0"):
        ADP(alpha=value)
    with pytest.raises(ValueError, match="beta must be a finite number of at least 0"):
        ADP(beta=value)
