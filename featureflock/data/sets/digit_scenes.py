"""Digit scenes: 24 × 24 images with one to four handwritten digits, for segmentation and multi-label classification.

Each quarter of a scene has a scan of scikit-learn's digits with probability ¾, at a random place within the quarter. No
scan is used in both training and test scenes.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from featureflock.data.examples import Normalisation, TensorExamples
from featureflock.data.rng import Stream, permutation
from featureflock.data.sets.base import DATA_SETS, DataSet, Splits
from featureflock.data.sets.digits import scans
from featureflock.data.sources.class_names import DIGITS
from featureflock.tasks import Classification, MultiLabel, Task

_SIZE, _CELL, _SCAN = 24, 12, 8
_INK = 4
"""Pixels of at least this grey level of 16 belong to a digit."""


@DATA_SETS.register("digit-scenes")
@dataclass(frozen=True)
class DigitScenes(DataSet):
    """1,500 + 500 scenes of one to four digits of scikit-learn; no download needed."""

    targets: Literal["pixels", "labels"] = "pixels"
    """pixels: the class of each pixel, background or one of ten digits. labels: which of the ten digits are present."""

    @property
    def task(self) -> Task:  # type: ignore[override]
        """Classification of each pixel, or multi-label classification."""
        return Classification() if self.targets == "pixels" else MultiLabel()

    def load(self) -> Splits:
        x, y = scans()
        order = permutation(len(y), Stream.DIGITS_SPLIT)
        parts = []
        for seed, (rows, count) in enumerate(((order[:1200], 1500), (order[1200:], 500))):
            images, classes = _scenes((16 * x[rows]).round(), y[rows], count, torch.Generator().manual_seed(seed))
            present = torch.stack([(classes == digit + 1).flatten(1).any(1) for digit in range(10)], 1)
            target = classes if self.targets == "pixels" else present.float()
            norm = Normalisation((0.0,), (16.0,))
            parts.append(TensorExamples(images[:, None], target, normalisation=norm, white=16, task=self.task))
        names = ("background", *DIGITS) if self.targets == "pixels" else DIGITS
        return Splits(parts[0], parts[1], len(names), class_names=names, task=self.task)


def _scenes(x: Tensor, y: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images (N, 24, 24) in uint8, and the class of each pixel: 0 for background, 1 + digit."""
    images = torch.zeros(count, _SIZE, _SIZE, dtype=torch.uint8)
    classes = torch.zeros(count, _SIZE, _SIZE, dtype=torch.int64)
    filled = torch.rand(count, 4, generator=generator) < 0.75
    filled[:, 0] |= ~filled.any(1)  # at least one digit
    chosen = torch.randint(len(y), (count, 4), generator=generator)
    shift = torch.randint(_CELL - _SCAN + 1, (count, 4, 2), generator=generator)
    for scene, cell in filled.nonzero().tolist():
        scan = int(chosen[scene, cell])
        top, left = (_CELL * part + int(s) for part, s in zip(divmod(cell, 2), shift[scene, cell], strict=True))
        place = scene, slice(top, top + _SCAN), slice(left, left + _SCAN)
        images[place] = x[scan].to(torch.uint8)
        classes[place] = torch.where(x[scan] >= _INK, y[scan] + 1, 0)
    return images, classes
