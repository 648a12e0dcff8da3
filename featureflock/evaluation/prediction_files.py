"""Predictions of any ensemble in .npz files, one for each method and seed.

    np.savez("mine-seed0.npz", probs=probs, labels=labels, **{"corrupted/fog/3": probs_fog, "ood/svhn": probs_svhn})

    probs               (n, B, C), or `logits`; for regression `means` and `variances`
    labels              (B,), the same in all files
    corrupted/fog/3     (n, B, C), any corruption and severity; optional, as all that follow
    ood/svhn            (n, ·, C), any OOD set
    validation, validation_labels       (n, ·, C) and (·,): held-out examples, on which a temperature may be fitted
    method, seed        a string and an integer; by default from the name of the file: METHOD-seedK.npz
    class_names         (C,) strings

Files are read without unpickling, so no code in them is run. Arrays are read when they are used.
"""

import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featureflock.evaluation.any_ensemble import compare_runs, method_title
from featureflock.evaluation.array_runs import ArrayRun, Loaders
from featureflock.evaluation.results import EvaluationResults
from featureflock.evaluation.test_sets import CalibrationChoice
from featureflock.tasks import Classification, Task

_NAME = re.compile(r"(?P<method>.+?)[-_ .]*seed[-_ ]*(?P<seed>\d+)", flags=re.I)
_ABOUT = ("labels", "method", "seed", "class_names")


class PredictionFile(NamedTuple):
    """The content of a file."""

    path: Path
    method: str
    seed: int
    labels: NDArray[Any]
    class_names: list[str]
    arrays: Loaders


def evaluate_files(
    paths: Sequence[Path | str],
    task: Task = Classification(),
    *,
    baseline: str | None = None,
    calibration: CalibrationChoice = "auto",
    data: str = "custom data",
) -> EvaluationResults:
    """Measure and compare the predictions in files; see `evaluate_predictions`."""
    files = [read_predictions(path) for path in paths]
    groups: dict[str, dict[int, ArrayRun]] = {}
    origin: dict[tuple[str, int], Path] = {}
    for file in files:
        first, title = files[0], method_title(file.method)
        if not np.array_equal(file.labels, first.labels):
            what = f"{first.path} and {file.path} have different labels"
            raise ValueError(f"{what}; all files must be predictions of the same examples in the same order.")
        if (twin := origin.setdefault((title, file.seed), file.path)) != file.path:
            what = f"{twin} and {file.path} are both {title}, seed {file.seed}"
            raise ValueError(f"{what}; name files METHOD-seedK.npz, or store `method` and `seed` in them.")
        groups.setdefault(title, {})[file.seed] = ArrayRun(file.arrays, file.labels, task, str(file.path))
    class_names = next((file.class_names for file in files if file.class_names), [])
    return compare_runs(groups, baseline, calibration, data, class_names)


def read_predictions(path: Path | str) -> PredictionFile:
    """Read what a file says about itself; its predictions are read when they are used."""
    path = Path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"{path} {what}; give an .npz file of predictions and labels.")
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            names = list(loaded) if isinstance(loaded, Mapping) else None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not an .npz file; write one with np.savez.") from error
    if names is None:
        raise ValueError(f"{path} holds a single array; write predictions and labels with np.savez.")
    if "labels" not in names:
        got = ", ".join(names) or "nothing"
        raise ValueError(f"{path} has no labels, only {got}; add them, np.savez(…, labels=labels).")
    about = {}
    for name in [name for name in _ABOUT if name in names]:
        try:
            about[name] = _read(path, name)
        except ValueError as error:
            raise ValueError(f"{path}, {name}: {error}") from error
    match = _NAME.fullmatch(path.stem)
    method = about.get("method", np.asarray(match["method"] if match else path.stem))
    seed = about.get("seed", np.asarray(int(match["seed"]) if match else 0))
    class_names = about.get("class_names", np.empty(0, "U1"))
    if method.dtype.kind != "U" or method.ndim or not str(method).strip():
        raise ValueError(f"{path}: method must be a string; got {method!r}.")
    if seed.dtype.kind not in "iu" or seed.ndim:
        raise ValueError(f"{path}: seed must be an integer; got {seed!r}.")
    if class_names.dtype.kind != "U" or class_names.ndim != 1:
        raise ValueError(f"{path}: class_names must be an array of strings, one for each class.")
    arrays = {name: partial(_read, path, name) for name in names if name not in _ABOUT}
    return PredictionFile(path, str(method), int(seed), about["labels"], class_names.tolist(), arrays)


def _read(path: Path, name: str) -> NDArray[Any]:
    try:
        with path.open("rb") as file:
            array: NDArray[Any] = np.load(file, allow_pickle=False)[name]
            return array
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        what = "Python objects are never loaded" if "pickle" in str(error) else "the array cannot be read"
        raise ValueError(f"{what}; write an array of numbers with np.savez.") from error
