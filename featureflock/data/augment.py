"""Random crop and horizontal flip of a whole batch at once, on its own device.

The augmentation of image `index` in epoch e is a function of (seed, e, index) alone.

Shapes: B images, C channels, H × W pixels.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from featureflock.data.rng import Stream, below


@dataclass(frozen=True)
class EpochKey:
    """Keys of the random numbers of one epoch of training."""

    seed: int
    epoch: int


def crop_and_flip(x_bchw: Tensor, index_b: Tensor, key: EpochKey, *, padding: int, flip: bool) -> Tensor:
    """Crop each image at random from itself padded with `padding` black pixels, and flip it with probability ½.

    Returns (B, C, H, W) in channels_last order, because whole pixels are gathered.
    """
    height, width = x_bchw.shape[-2:]
    device = x_bchw.device
    keys = key.seed, key.epoch, index_b.to(device, non_blocking=True)
    top_b = below(2 * padding + 1, *keys, Stream.CROP_TOP)
    left_b = below(2 * padding + 1, *keys, Stream.CROP_LEFT)
    column_w = torch.arange(width, device=device)
    if flip:
        column_w = torch.where(below(2, *keys, Stream.FLIP)[:, None] == 1, width - 1 - column_w, column_w)
    row_bh = top_b[:, None] + torch.arange(height, device=device)
    column_bw = left_b[:, None] + column_w
    padded_bhwc = F.pad(x_bchw, (padding,) * 4).permute(0, 2, 3, 1)
    image_b = torch.arange(len(x_bchw), device=device)
    window_bhwc = padded_bhwc[image_b[:, None, None], row_bh[:, :, None], column_bw[:, None, :]]
    return window_bhwc.permute(0, 3, 1, 2)
