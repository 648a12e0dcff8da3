"""Random crop and horizontal flip for a whole batch at once, wherever it lies.

What picture `index` gets in epoch e is a function of (seed, e, index) alone.

Shapes: B pictures, C channels, H × W pixels.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from featureflock.data.rng import below


@dataclass(frozen=True)
class EpochKey:
    """Which random numbers an epoch of training takes."""

    seed: int
    epoch: int


def crop_and_flip(x_bchw: Tensor, index_b: Tensor, draw: EpochKey, *, padding: int, flip: bool) -> Tensor:
    """A random window of each picture with `padding` black pixels around it, and with probability ½ its mirror image.

    The result is in channels_last order, because whole pixels are what is gathered.
    """
    height, width = x_bchw.shape[-2:]
    device = x_bchw.device
    keys = draw.seed, draw.epoch, index_b.to(device, non_blocking=True)
    top_b, left_b = below(2 * padding + 1, *keys, 0), below(2 * padding + 1, *keys, 1)
    column_w = torch.arange(width, device=device)
    if flip:
        column_w = torch.where(below(2, *keys, 2)[:, None] == 1, width - 1 - column_w, column_w)
    row_bh = top_b[:, None] + torch.arange(height, device=device)
    column_bw = left_b[:, None] + column_w
    padded_bhwc = F.pad(x_bchw, (padding,) * 4).permute(0, 2, 3, 1)
    picture_b = torch.arange(len(x_bchw), device=device)
    window_bhwc = padded_bhwc[picture_b[:, None, None], row_bh[:, :, None], column_bw[:, None, :]]
    return window_bhwc.permute(0, 3, 1, 2)
