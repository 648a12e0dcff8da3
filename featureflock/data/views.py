"""Views: parts of an input each of which suffices to predict the class.

    x_only v = x inside view v, the mean training input outside          (zeros after normalisation)

The rest is filled with the mean, because zeros after normalisation carry no information. Black is far from the mean of
photographs and would be a second change besides the missing view. Images in bytes get the bytes nearest to the mean.
"""

from typing import NamedTuple

import torch

from featureflock.data.examples import TensorExamples


class View(NamedTuple):
    """A named rectangle of an image. The test set that shows only this view is called only-NAME."""

    name: str
    rows: slice
    columns: slice


def only_view(examples: TensorExamples, view: View) -> TensorExamples:
    """Return the examples (N, C, H, W) with everything blank outside one view."""
    normalisation, shape = examples.normalisation, examples.shape
    blank = torch.zeros(shape) if normalisation is None else normalisation.mean_input(shape)
    if not examples.x.is_floating_point():
        blank = blank.round()
    x = blank.to(examples.x).expand_as(examples.x).contiguous()
    x[:, :, view.rows, view.columns] = examples.x[:, :, view.rows, view.columns]
    return TensorExamples(x, examples.labels, normalisation=normalisation, white=examples.white)
