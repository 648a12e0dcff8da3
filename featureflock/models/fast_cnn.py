"""Fast convolutional network for small photographs: a whitening layer, then short stages of convolutions.

    x ← gelu(W (patch − μ) + b)                        every 2×2 patch; W and μ fixed, the same for all members
    x ← gelu(bn₁(pool(conv₁(x)))),  x ← gelu(bn₂(conv₂(x)))      one stage, at half the resolution of the one before
    h = max over pixels of x / 8

Neighbouring pixels are strongly correlated, and a network spends its first epochs on decorrelating them. Whitening does
that before training (Hyvärinen et al. 2009, "Natural Image Statistics", chapter 5). With Σ = V Λ Vᵀ the covariance of
patches,

    W = ± (Λ + ε)^{−1/2} Vᵀ,        ε = 5e-4 · mean of Λ

has outputs of covariance 1 up to ε, which keeps noise directions from being amplified. Both signs are used because a
GELU passes little more than one of them. `fit` computes Σ and μ from training images.

A 3×3 convolution is initialised to pass its inputs through to its first outputs; the other outputs are random, as in
layers.py. Pooling comes before BatchNorm and GELU, which reduces their cost by four. Features are divided by 8 because
maxima are large: with a norm of about 2, a linear head is stable at a learning rate of 0.5.

Shapes: N images, C channels, H × W pixels; P = 4 C numbers in a patch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from featureflock.models.base import MODELS, ModelConfig, image_channels
from featureflock.models.layers import check_positive, conv, initialise

_PATCH, _EPSILON, _CHUNK = 2, 5e-4, 100


class FastCNN(nn.Module):
    """Maps images (B, channels, H, W), usually 32×32, to features (B, widths[-1]). `widths` are those of the stages."""

    def __init__(self, widths: Sequence[int] = (32, 64, 128), channels: int = 3) -> None:
        super().__init__()
        check_positive("channels", channels)
        check_positive("widths", *widths)
        self.whitening = Whitening(channels)
        self.stages = nn.Sequential()
        inputs = 2 * channels * _PATCH**2
        for width in widths:
            self.stages.append(Stage(inputs, width))
            inputs = width
        self.feature_dim = inputs
        initialise(self)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.dirac_(m.weight.data[: m.in_channels])

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.stages(F.gelu(self.whitening(x)))
        return maps.amax((-2, -1)) / 8

    def fit(self, x_nchw: Tensor) -> None:
        """Fit the whitening layer to images."""
        self.whitening.fit(x_nchw)


class Whitening(nn.Module):
    """W (patch − μ) + b of all 2×2 patches: (B, C, H, W) -> (B, 2 P, H − 1, W − 1). Only b is trained.

    Before `fit`, W = ± identity and μ = 0.
    """

    weight: Tensor
    shift: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        size = channels * _PATCH**2
        self.register_buffer("weight", _both_signs(torch.eye(size), channels))
        self.register_buffer("shift", torch.zeros(2 * size))
        self.bias = nn.Parameter(torch.zeros(2 * size))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias + self.shift)

    @torch.no_grad()
    def fit(self, x_nchw: Tensor) -> None:
        """Compute W and μ from images (see the equations at the top of this file)."""
        mean_p, cov_pp = patch_moments(x_nchw)
        values_p, vectors_pp = torch.linalg.eigh(cov_pp)
        scale = values_p.mean() if values_p.mean() > 0 else 1.0  # images of a single colour
        largest_p = vectors_pp.gather(0, vectors_pp.abs().argmax(0, keepdim=True))
        w_pp = (vectors_pp * largest_p.sign() / (values_p.clamp_min(0) + _EPSILON * scale).sqrt()).T.flip(0)
        self.weight.copy_(_both_signs(w_pp, x_nchw.shape[1]))
        self.shift.copy_(-self.weight.flatten(1).double() @ mean_p)


def patch_moments(x_nchw: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (P,) and covariance (P, P) of all 2×2 patches of images, in float64."""
    size, count = x_nchw.shape[1] * _PATCH**2, 0
    total_p = torch.zeros(size, dtype=torch.float64, device=x_nchw.device)
    product_pp = torch.zeros(size, size, dtype=torch.float64, device=x_nchw.device)
    for x in x_nchw.split(_CHUNK):
        patch_pm = F.unfold(x.double(), _PATCH).transpose(0, 1).flatten(1)
        total_p += patch_pm.sum(1)
        product_pp += patch_pm @ patch_pm.T
        count += patch_pm.shape[1]
    mean_p = total_p / count
    return mean_p, product_pp / count - mean_p.outer(mean_p)


def _both_signs(w_pp: Tensor, channels: int) -> Tensor:
    return torch.cat([w_pp, -w_pp]).view(-1, channels, _PATCH, _PATCH)


class Stage(nn.Module):
    """Two 3×3 convolutions. The output of the first is max-pooled to half the size."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, width, 3), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.bn2(self.conv2(F.gelu(self.bn1(max_pool_if_possible(self.conv1(x)))))))


def max_pool_if_possible(x: Tensor) -> Tensor:
    """2×2 max-pooling, or the identity if the image is one pixel high or wide."""
    return F.max_pool2d(x, 2) if min(x.shape[-2:]) > 1 else x


torch.fx.wrap("max_pool_if_possible")  # its branch depends on the size, which is unknown when a network is traced


@MODELS.register("fast-cnn")
@dataclass(frozen=True)
class FastCNNConfig(ModelConfig):
    """Convolutional network on whitened patches, which learns small photographs in few epochs."""

    fit_examples = 1000

    widths: tuple[int, ...] = (32, 64, 128)
    """Channels of the stages, each at half the resolution of the one before; the last is the number of features."""

    def __post_init__(self) -> None:
        check_positive("widths", *self.widths)

    def extractor(self, shape: tuple[int, ...]) -> FastCNN:
        return FastCNN(self.widths, image_channels(shape))

    def fit(self, extractor: nn.Module, x: Tensor) -> None:
        if isinstance(extractor, FastCNN):
            extractor.fit(x)
