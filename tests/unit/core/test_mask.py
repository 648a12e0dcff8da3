"""Token masks: padded tokens take no part in prior and repulsion, as if they were removed."""

import pytest
import torch
from torch.testing import assert_close

import featureflock as ff

N, B, T, H = 4, 3, 5, 6
LENGTHS = (5, 2, 3)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(N, B, T, H, generator=generator, dtype=torch.float64)
    grad = torch.randn(N, B, T, H, generator=generator, dtype=torch.float64) / 10
    mask = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
    return features, grad, mask


def passed(layer, features, grad, *mask):
    features = features.clone().requires_grad_()
    layer(features, *mask).backward(grad)
    return features.grad


@pytest.mark.parametrize("prior", [ff.Cauchy(0.1), ff.Normal(0.5)])
@pytest.mark.parametrize("rank", [2, None])
@pytest.mark.parametrize("rule", [ff.WGD(), ff.SVGD()])
def test_masked_tokens_are_as_good_as_removed(batch, prior, rank, rule):
    features, grad, mask = batch
    layer = ff.ParticleLayer(prior, rank=rank, rule=rule)
    masked = passed(layer, features, grad, mask)
    # the same tokens as a sequence without padding; `count` is the number of sequences
    removed = ff.ParticleLayer(prior, rank=rank, rule=rule, count=B)
    expected = passed(removed, features[:, mask][:, None], grad[:, mask][:, None])
    assert_close(masked[:, mask], expected[:, 0])
    # padding gets the gradient of the loss, n times that of the mean loss as all members do
    assert_close(masked[:, ~mask], N * grad[:, ~mask])
    assert (masked - passed(layer, features, grad)).abs().max() > 1e-3


def test_features_of_padding_do_not_matter(batch):
    features, grad, mask = batch
    layer = ff.ParticleLayer(rank=2)
    other = torch.where(mask[None, :, :, None], features, torch.nan)
    assert_close(passed(layer, features, grad, mask), passed(layer, other, grad, mask))
    assert_close(passed(layer, features, grad, mask), passed(layer, features, grad, mask.long()))


def test_a_loss_of_each_token_counts_the_tokens_that_are_not_masked(batch):
    features, grad, mask = batch
    by_token = ff.ParticleLayer(rank=2, count="tokens")
    by_number = ff.ParticleLayer(rank=2, count=sum(LENGTHS))
    assert_close(passed(by_token, features, grad, mask), passed(by_number, features, grad, mask))
    assert_close(passed(by_token, features, grad), passed(ff.ParticleLayer(rank=2, count=B * T), features, grad))


def test_a_mask_of_ones_changes_nothing(batch):
    features, grad, mask = batch
    layer = ff.ParticleLayer(rank=2)
    assert_close(passed(layer, features, grad, torch.ones_like(mask)), passed(layer, features, grad), rtol=0, atol=0)


def test_wrong_masks_are_refused(batch):
    features, grad, mask = batch
    layer = ff.ParticleLayer(rank=2)
    with pytest.raises(ValueError, match="mask must be a tensor of bool"):
        passed(layer, features, grad, mask.double())
    with pytest.raises(ValueError, match="mask must be \\(batch, tokens\\)"):
        passed(layer, features, grad, mask.T)
    with pytest.raises(ValueError, match='count="tokens" needs'):
        passed(ff.ParticleLayer(rank=2, count="tokens"), features[:, :, 0, 0], grad[:, :, 0, 0])
