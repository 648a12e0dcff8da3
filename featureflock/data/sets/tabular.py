"""Tabular data sets for regression: diabetes, which scikit-learn includes, and diamonds, from the package plotnine.

Inputs are standardised by the mean and standard deviation of the training set. Targets are stored in their own unit;
`Recipe.splits` standardises them for the loss by the statistics of the examples that are trained on.
"""

import csv
import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from featureflock.data.examples import Normalisation, TensorExamples
from featureflock.data.rng import Stream, permutation
from featureflock.data.sets.base import DATA_SETS, DataSet, Splits
from featureflock.tasks import HeteroscedasticRegression, Regression, Task

Noise = Literal["common", "by-input"]


@dataclass(frozen=True)
class _Tabular(DataSet):
    noise: Noise = "common"
    """Variance of the Gaussian noise: one that is learnt for all inputs, or a function of the input."""

    test_size: ClassVar[int]

    @property
    def task(self) -> Task:  # type: ignore[override]
        """Regression, with the noise that was chosen."""
        return Regression() if self.noise == "common" else HeteroscedasticRegression()

    def _splits(self, x: Tensor, y: Tensor, names: tuple[str, ...]) -> Splits:
        order = permutation(len(y), Stream.TABULAR_SPLIT)
        test, train = order[: self.test_size], order[self.test_size :]
        mean, std = x[train].mean(0), x[train].std(0, correction=0)
        normalisation = Normalisation(tuple(mean.tolist()), tuple(std.tolist()))
        parts = [
            TensorExamples(x[rows].float(), y[rows].float(), normalisation=normalisation, task=self.task)
            for rows in (train, test)
        ]
        return Splits(parts[0], parts[1], 1, task=self.task, feature_names=names)


@DATA_SETS.register("diabetes")
@dataclass(frozen=True)
class Diabetes(_Tabular):
    """Disease progression of 442 patients after one year, from 10 measurements; no download needed.

    342 patients are for training and 100 for testing. The target is a score from 25 to 346.
    """

    test_size = 100

    def load(self) -> Splits:
        from sklearn.datasets import load_diabetes  # importing it takes a second, so only when needed

        data = load_diabetes(scaled=False)
        return self._splits(torch.from_numpy(data.data), torch.from_numpy(data.target), tuple(data.feature_names))


_NUMBERS = ("carat", "depth", "table", "x", "y", "z")
_GRADES = {
    "cut": ("Fair", "Good", "Very Good", "Premium", "Ideal"),
    "color": ("J", "I", "H", "G", "F", "E", "D"),
    "clarity": ("I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF"),
}
"""Grades from worst to best; they are coded as 0, 1, 2, …"""


@DATA_SETS.register("diamonds")
@dataclass(frozen=True)
class Diamonds(_Tabular):
    """Log price of 53,940 diamonds, from 6 sizes and 3 grades; needs pip install "featureflock[diamonds]".

    43,940 diamonds are for training and 10,000 for testing. The target is the natural logarithm of the price in
    dollars. Grades are coded as 0, 1, 2, … from worst to best.
    """

    test_size, train_size, input_shape = 10_000, 43_940, (9,)

    def load(self) -> Splits:
        names = (*_NUMBERS, *_GRADES)
        with open(_diamonds_file(), newline="", encoding="utf-8") as file:
            lines = [
                ([_number(line, name) for name in names], math.log(float(line["price"])))
                for line in csv.DictReader(file)
            ]
        x, y = (torch.tensor(part, dtype=torch.float64) for part in zip(*lines, strict=True))
        return self._splits(x, y, names)


def _diamonds_file() -> Path:
    """The CSV file in the installed package plotnine, which is located without importing it."""
    spec = importlib.util.find_spec("plotnine")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec is not None else []
    for folder in folders:
        if (path := folder / "data" / "diamonds.csv").is_file():
            return path
    raise FileNotFoundError(
        'The diamonds are in the package plotnine, which is not installed; run pip install "featureflock[diamonds]".'
    )


def _number(line: dict[str, str], name: str) -> float:
    return float(_GRADES[name].index(line[name])) if name in _GRADES else float(line[name])
