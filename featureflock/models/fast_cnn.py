"""A network that learns small photographs in few products: whitened patches, then short stages of convolutions.

    x ← gelu(W (patch − μ) + b)                        every 2×2 patch; W and μ fixed, the same for all members
    x ← gelu(bn₁(pool(conv₁(x)))),  x ← gelu(bn₂(conv₂(x)))      a stage, at half the size of the one before
    h = max over pixels of x / 8

Pixels beside each other are nearly equal, so a network spends its first epochs on telling them apart. Whitening does it
beforehand (Hyvärinen et al. 2009, "Natural Image Statistics", chapter 5). With Σ = V Λ Vᵀ the covariance of patches,

    W = ± (Λ + ε)^{−1/2} Vᵀ,        ε = 5e-4 · mean of Λ

has outputs of covariance 1, but for ε, which keeps directions that hold nothing but noise from being blown up; both
signs, because a GELU hardly passes on more than one. Σ and μ are those of the training pictures: `fit` sets them.

A 3×3 convolution starts by handing its inputs on, one to each of its first outputs; further outputs are drawn at random
as in layers.py. Pooling comes before BatchNorm and GELU, which then have a quarter of the work. Features are divided by
8 because maxima are large: with a norm of about 2 they let a linear head keep up with a learning rate of 0.5.

Shapes: N pictures, C channels, H × W pixels; P = 4 C numbers in a patch.
"""

from collections.abc import Sequence

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from featureflock.models.layers import check_positive, conv, initialise

_PATCH = 2
_EPSILON = 5e-4
_CHUNK = 100


class FastCNN(nn.Module):
    """Pictures (B, channels, H, W) made for 32×32, to features (B, widths[-1]).

    Args:
        widths: channels of the stages, one after another.
        channels: of the pictures.
    """

    def __init__(self, widths: Sequence[int] = (32, 64, 128), channels: int = 3) -> None:
        super().__init__()
        check_fast(widths)
        check_positive("channels", channels)
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
        """Whiten patches as those of these pictures."""
        self.whitening.fit(x_nchw)


class Whitening(nn.Module):
    """W (patch − μ) + b for all 2×2 patches: (B, C, H, W) to (B, 2 P, H − 1, W − 1). Only b is trained.

    Until `fit`, it takes patches to be white already: W = ± 1.
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
        """Set W and μ by pictures: the equations at the top of this file."""
        mean_p, cov_pp = patch_moments(x_nchw)
        values_p, vectors_pp = torch.linalg.eigh(cov_pp)
        scale = values_p.mean() if values_p.mean() > 0 else 1.0  # pictures of one colour
        largest_p = vectors_pp.gather(0, vectors_pp.abs().argmax(0, keepdim=True))
        w_pp = (vectors_pp * largest_p.sign() / (values_p.clamp_min(0) + _EPSILON * scale).sqrt()).T.flip(0)
        self.weight.copy_(_both_signs(w_pp, x_nchw.shape[1]))
        self.shift.copy_(-self.weight.flatten(1).double() @ mean_p)


def patch_moments(x_nchw: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (P,) and covariance (P, P) of all 2×2 patches of pictures, in float64."""
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
    """Two 3×3 convolutions, the first of which is pooled to half the size, as long as there are two pixels to pool."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, width, 3), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.bn2(self.conv2(F.gelu(self.bn1(halved(self.conv1(x)))))))


def halved(x: Tensor) -> Tensor:
    """The largest of each 2×2 pixels, as long as there are two to choose from."""
    return F.max_pool2d(x, 2) if min(x.shape[-2:]) > 1 else x


torch.fx.wrap("halved")  # its path depends on the size, which those who trace a network do not know


def check_fast(widths: Sequence[int]) -> None:
    """Refuse a network without stages."""
    if not widths:
        raise ValueError("A fast network needs at least one stage; give widths such as (32, 64, 128).")
    for width in widths:
        check_positive("each of widths", width)
