"""Views: parts of an input each of which tells the class on its own, and inputs of which only one view is left.

    x_only v = x inside view v, the mean of the training inputs elsewhere          zeros after normalisation

Zeros after normalisation, not black, because they say nothing in the units of the network: black is far from what a
network sees of photographs, where it would be one more change beside the missing view. For digits, of which no mean is
subtracted, the two are the same. Bytes stay bytes: they become those nearest to the mean.
"""

from typing import NamedTuple

import torch

from featureflock.data.examples import TensorExamples


class View(NamedTuple):
    """A rectangle of a picture."""

    name: str
    """As test sets of it are called: only-digit."""
    rows: slice
    columns: slice


def only_view(examples: TensorExamples, view: View) -> TensorExamples:
    """The examples (N, C, H, W) with everything blank but one view."""
    blank = torch.zeros(examples.shape) if examples.scale is None else examples.scale.zero(examples.shape)
    if not examples.x.is_floating_point():
        blank = blank.round()
    x = blank.to(examples.x).expand_as(examples.x).contiguous()
    x[:, :, view.rows, view.columns] = examples.x[:, :, view.rows, view.columns]
    return TensorExamples(x, examples.labels, scale=examples.scale, white=examples.white)
