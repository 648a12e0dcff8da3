"""The fast network: patches become white, the start is the identity, and a training run sets it by its data."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.short_runs import SHORT, same, weights
from torch.testing import assert_close

from featureflock.data import CustomData, Digits
from featureflock.models import FastCNN, FastCNNConfig
from featureflock.models.fast_cnn import Stage, patch_moments
from featureflock.training import RECIPES, train
from featureflock.training.build import build


def correlated_images(count: int = 250, channels: int = 3) -> torch.Tensor:
    """Images with correlated pixels and channels and a non-zero mean."""
    x = torch.randn(count, 1 + channels, 12, 14, generator=torch.Generator().manual_seed(0))
    smooth, noise = F.avg_pool2d(x[:, :1], 3, 1), x[:, 1:, 1:-1, 1:-1]
    return (smooth + 0.2 * noise) * torch.arange(1, channels + 1).view(-1, 1, 1) + 0.5


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x Φ(x)."""
    return x * torch.special.ndtr(x)


def patches(x: torch.Tensor) -> np.ndarray:
    """All 2×2 patches, one by one: (P, number of patches)."""
    height, width = x.shape[-2:]
    cut = [x[..., i : i + 2, j : j + 2].flatten(1) for i in range(height - 1) for j in range(width - 1)]
    return torch.cat(cut).double().numpy().T


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_moments_are_computed_over_all_patches(channels):
    x = correlated_images(channels=channels)
    mean, cov = patch_moments(x)
    assert_close(mean.numpy(), patches(x).mean(1))
    assert_close(cov.numpy(), np.cov(patches(x), bias=True))


@pytest.mark.parametrize("channels", [1, 3])
def test_whitened_patches_have_covariance_one_and_mean_zero(channels):
    """Up to ε: a direction of variance λ has λ / (λ + ε) afterwards, with ε = 5e-4 of the mean variance."""
    x, net = correlated_images(channels=channels), FastCNN((8,), channels).double()
    net.fit(x.double())
    out = net.whitening(x.double()).detach()
    size = 4 * channels
    rows = out.transpose(0, 1).flatten(1)
    variances = np.linalg.eigvalsh(np.cov(patches(x), bias=True))[::-1]
    kept = torch.from_numpy(variances / (variances + 5e-4 * variances.mean()))
    assert 0.5 < kept[-1] < kept[0] <= 1
    assert_close(rows[:size] @ rows[:size].T / rows.shape[1], kept.diag(), atol=1e-6, rtol=0)
    assert_close(rows.mean(1), torch.zeros(2 * size, dtype=torch.float64), atol=1e-6, rtol=0)
    assert_close(rows[size:], -rows[:size])


def test_whitening_does_not_depend_on_units_order_or_seed():
    x = correlated_images()
    outputs = []
    for seen, seed in ((x, 0), (x.flip(0), 1), (100 * x - 30, 2)):
        torch.manual_seed(seed)
        net = FastCNN()
        net.fit(seen)
        outputs.append(net.whitening(100 * x - 30 if seed == 2 else x).detach())
    assert_close(outputs[1], outputs[0], atol=1e-4, rtol=1e-4)
    assert_close(outputs[2], outputs[0], atol=1e-2, rtol=1e-2)


def test_images_of_a_single_colour_give_finite_weights():
    net = FastCNN((8,), 1)
    net.fit(torch.full((5, 1, 4, 4), 0.25))
    assert_close(net.whitening(torch.full((1, 1, 4, 4), 0.25)), torch.zeros(1, 8, 3, 3), atol=1e-5, rtol=0)


def test_whitening_is_the_identity_before_fit():
    x = correlated_images(3)
    out = FastCNN().whitening(x)
    assert torch.equal(out[:, 0], x[:, 0, :-1, :-1])
    assert torch.equal(out[:, 12 + 11], -x[:, 2, 1:, 1:])


def test_a_stage_computes_its_equation_and_initially_passes_its_inputs_through():
    net = FastCNN((32, 40)).double().eval()
    x = torch.rand(2, 24, 7, 9, dtype=torch.float64)
    stage = net.stages[0]
    h = F.max_pool2d(F.conv2d(x, stage.conv1.weight, padding=1), 2)
    h = F.conv2d(gelu(stage.bn1(h)), stage.conv2.weight, padding=1)
    assert_close(stage(x), gelu(stage.bn2(h)))
    for bn in (stage.bn1, stage.bn2):
        bn.eps = 0.0
    assert_close(stage(x)[:, :24], gelu(gelu(F.max_pool2d(x, 2))))
    assert Stage(4, 6)(torch.rand(3, 4, 1, 5)).shape == (3, 6, 1, 5)  # nothing is left to pool
    features = net.stages(gelu(net.whitening(correlated_images(2).double()))).flatten(2).max(-1).values / 8
    assert_close(net(correlated_images(2).double()), features)


@pytest.mark.parametrize(
    ("widths", "shape"), [((32, 64, 128), (3, 32, 32)), ((8, 16, 24, 32), (1, 8, 16)), ((8,), (2, 2, 2))], ids=str
)
def test_features_have_the_size_feature_dim(widths, shape):
    extractor = FastCNNConfig(widths).extractor(shape)
    assert extractor(torch.randn(4, *shape)).shape == (4, extractor.feature_dim) == (4, widths[-1])


def test_all_members_are_whitened_by_the_same_training_images():
    recipe = replace(SHORT, model=FastCNNConfig((8, 16)), subset=None)
    splits = recipe.data.load()
    ens, other = build(recipe, splits), build(replace(recipe, seed=1, members=2), splits)
    first = ens.extractors[0].whitening
    for extractor in (*ens.extractors, *other.extractors):
        assert torch.equal(extractor.whitening.weight, first.weight)
        assert torch.equal(extractor.whitening.shift, first.shift)
    a, b = (e.stages[1].conv1.weight for e in ens.extractors[:2])
    assert not torch.equal(a, b)
    _, cov = patch_moments(splits.train.x.float() / 16)
    w = first.weight[:4].flatten(1).double()
    assert_close(w @ cov @ w.T, torch.eye(4, dtype=torch.float64), atol=0.1, rtol=0)  # of 1,000 of the 1,200 scans


def test_whitening_uses_images_without_augmentation():
    x, y = (correlated_images(40) * 10).clamp(0, 255).to(torch.uint8), torch.arange(40) % 3
    plain, augmented = (
        build(replace(SHORT, data=CustomData((x, y), (x, y), padding=p, flip=p > 0), model=FastCNNConfig((8,))), splits)
        for p in (0, 3)
        for splits in [CustomData((x, y), (x, y), padding=p, flip=p > 0).load()]
    )
    assert torch.equal(plain.extractors[0].whitening.weight, augmented.extractors[0].whitening.weight)


def test_training_does_not_change_the_whitening(tmp_path):
    recipe = replace(SHORT, data=Digits(), model=FastCNNConfig((8, 16)), members=2, epochs=8, schedule="one-cycle")
    result = train(recipe, tmp_path / "run")
    fresh = build(recipe, recipe.data.load().split(subset=recipe.subset))
    trained = weights(tmp_path / "run")
    for name, tensor in fresh.state_dict().items():
        if name == "temperature":  # set by `calibrate`, not by training
            continue
        assert torch.equal(trained[name], tensor) == ("whitening" in name and "bias" not in name), name
    assert result["test"]["accuracy"] > 50
    train(recipe, tmp_path / "again")
    assert same(trained, weights(tmp_path / "again"))


def test_the_recipe_stays_within_its_flop_budget():
    """Five members, forward and backward, take at most 3e14 FLOPs."""
    from torch.utils.flop_counter import FlopCounterMode

    recipe = RECIPES["cifar10-fast"].recipe
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        recipe.model.extractor((3, 32, 32)).eval()(torch.empty(1, 3, 32, 32))
    assert recipe.members == 5
    assert 3 * counter.get_total_flops() * 50_000 * recipe.epochs * 5 < 3.05e14
