"""Predictions of a regression run for the rows of a CSV file, in the unit of the targets."""

import csv
import io
import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
from torch import Tensor

from featureflock.data import InputFormat
from featureflock.data.examples import normalise
from featureflock.evaluation.predictions import Predictor
from featureflock.utils.files import open_regular

_LONGEST_LINE = 1 << 20
_LARGEST = torch.finfo(torch.float32).max


class RowPrediction(NamedTuple):
    """Prediction for one row of a table."""

    row: int
    """Counted from 1, without the header."""
    mean: float
    std: float
    """Standard deviation of the prediction, calibrated if the ensemble is."""
    epistemic_std: float
    """Standard deviation of the members' means."""


def predict_rows(predictor: Predictor, inputs: InputFormat, path: Path) -> list[RowPrediction]:
    """Predict every row of a CSV file whose header names the columns of the training data, in any order."""
    x = normalise(read_rows(path, inputs), inputs.normalisation)
    compute, ens = predictor.compute, predictor.ensemble
    x = x.to(torch.device(compute.device))
    prediction, uncertainty = ens.predict(x), ens.uncertainty(x)
    if prediction.mean.numel() != len(x):
        raise ValueError("The targets of this run have several numbers; predict in Python, with featureflock.load.")
    columns = (prediction.mean, prediction.std, uncertainty.epistemic.sqrt())
    numbers = zip(*(column.flatten().tolist() for column in columns), strict=True)
    return [RowPrediction(k, *values) for k, values in enumerate(numbers, 1)]


def read_rows(path: Path, inputs: InputFormat) -> Tensor:
    """Inputs (B, columns) in float32; ValueError for a file that does not have them."""
    names = inputs.feature_names
    if not names:
        raise ValueError("This run does not name its columns; predict in Python, with featureflock.load.")
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}.")
    numbers = array("f")
    try:
        with io.TextIOWrapper(open_regular(path, "give a CSV file"), encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(_lines(file))
            missing = [name for name in names if name not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"{path} needs a header with the columns {', '.join(names)}; {missing[0]} is missing.")
            for k, line in enumerate(reader, 1):
                numbers.extend(_number(path, k, name, line[name]) for name in names)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as a CSV file ({error}).") from error
    if not numbers:
        raise ValueError(f"{path} has no rows below its header.")
    return torch.tensor(numbers, dtype=torch.float32).view(-1, len(names))


def _lines(file: TextIO) -> Iterator[str]:
    """Lines of a text file, the memory of which is limited: a file may be one line."""
    while line := file.readline(_LONGEST_LINE + 1):
        if len(line) > _LONGEST_LINE:
            raise csv.Error(f"a line is longer than {_LONGEST_LINE:,} characters")
        yield line


def _number(path: Path, row: int, name: str, text: str | None) -> float:
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    if not abs(number) <= _LARGEST:
        raise ValueError(f"{path}, row {row}: {name} must be a finite number; got {text!r}.")
    return number
