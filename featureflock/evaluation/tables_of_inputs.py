"""Predictions of a regression run for the rows of a CSV file, in the unit of the targets."""

import csv
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from featureflock.data import InputFormat
from featureflock.data.examples import normalise
from featureflock.evaluation.predictions import Predictor


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
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in names if name not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"{path} needs a header with the columns {', '.join(names)}; {missing[0]} is missing.")
            rows = [[_number(path, k, name, line[name]) for name in names] for k, line in enumerate(reader, 1)]
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no file {path}.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as a CSV file ({error}).") from error
    if not rows:
        raise ValueError(f"{path} has no rows below its header.")
    return torch.tensor(rows, dtype=torch.float32)


def _number(path: Path, row: int, name: str, text: str | None) -> float:
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{path}, row {row}: {name} must be a finite number; got {text!r}.")
    return number
