"""Predictions of one ensemble of any origin on one or more test sets, by name.

    probs                                                                   (n, B, C), on the clean test set
    {"probs": probs, "corrupted": {"fog": {3: …}}, "ood": {"svhn": …}}      and on others
    {"probs": probs, "corrupted/fog/3": …, "ood/svhn": …}                   the same with flat names, as in files

`logits` in place of `probs` means that all arrays are logits or log-probabilities. Regression has `means` and
`variances`. Corrupted test sets have the examples of the clean one in the same order; OOD sets have any inputs.

Shapes: n members, B examples, C classes.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from featureflock.evaluation.arrays import member_predictions
from featureflock.evaluation.checks import as_tensor, kind_of
from featureflock.evaluation.metrics.regression import checked_mixture
from featureflock.evaluation.run_predictions import Calibration, RunPredictions, SetPredictions, cross_validation
from featureflock.tasks import Classification, Task

Loaders = Mapping[str, Callable[[], Any]]
"""Arrays by flat name, read when they are used."""
_TEST_SET = re.compile(r"corrupted/(?P<corruption>[^/]+)/(?P<severity>[1-9]\d*)|ood/(?P<ood>[^/]+)")
_CLEAN, _VALIDATION = ("probs", "logits", "means", "variances"), ("validation", "validation_labels")


def is_test_set(key: Any) -> bool:
    """Whether a key of a dictionary names predictions on a test set, not a method or a seed."""
    return key in (*_CLEAN, *_VALIDATION, "labels", "corrupted", "ood") or bool(_TEST_SET.fullmatch(str(key)))


@dataclass(frozen=True, eq=False)
class ArrayRun:
    """Predictions of one ensemble."""

    arrays: Loaders
    labels: Any
    """Targets of the clean test set."""
    task: Task
    name: str = ""
    """For messages: method and seed, or the file; empty if there is only one ensemble."""
    bare: bool = False
    """Whether there was one array without a name."""

    @classmethod
    def given(cls, predictions: Any, labels: Any, task: Task, logits: bool, name: str = "") -> "ArrayRun":
        """From an array, or a dictionary of arrays."""
        if isinstance(predictions, Mapping):
            run = cls(dict(_flat(predictions)), labels, task, name)
            if logits:
                raise run._error("", f"logits=True is for arrays; in a dictionary, {run._advice}.")
            return run
        if task.kind == "regression":
            if not isinstance(predictions, tuple | list) or len(predictions) != 2:
                pair = "a pair (means, variances), each (members, examples, …)"
                raise ValueError(f"{name}{': ' if name else ''}Regression needs predictions as {pair}.")
            means, variances = predictions
            return cls({"means": lambda: means, "variances": lambda: variances}, labels, task, name)
        key = "logits" if logits else "probs"
        return cls({key: lambda: predictions}, labels, task, name, bare=True)

    @property
    def test_sets(self) -> list[str]:
        """Names of the test sets besides the clean one."""
        return [key for key in self.arrays if _TEST_SET.fullmatch(key)]

    def check(self) -> None:
        """Read everything once, before any metric is computed; ValueError if anything cannot be right."""
        self._check_names()
        clean, y = self.clean()
        if len(y) < 2:
            raise self._error("", f"calibration needs at least two examples; got {len(y)}.")
        for key in [*self.test_sets, *(key for key in ("validation",) if key in self.arrays)]:
            members = self._members(key)
            if members.shape[::2] != clean.shape[::2]:
                shapes = f"{tuple(members.shape)} and {tuple(clean.shape)}"
                raise self._error(key, f"all test sets need the same members and classes; got shapes {shapes}.")
            if key.startswith("corrupted/") and members.shape[1] != clean.shape[1]:
                what = "a corrupted test set has the examples of the clean one, in the same order"
                raise self._error(key, f"{what}; got {members.shape[1]} and {clean.shape[1]} examples.")
        if "validation" in self.arrays:
            self.validation()

    def clean(self) -> tuple[Tensor, Tensor]:
        """The members' predictions on the clean test set as the task defines them, and the targets."""
        if self.task.kind == "regression":
            with self._named("means and variances"):
                return checked_mixture(self.arrays["means"](), self.arrays["variances"](), self.labels)
        members = self._members("logits" if "logits" in self.arrays else "probs")
        return members, self._targets(members, self.labels, "labels")

    def validation(self) -> tuple[Tensor, Tensor]:
        """The same for the validation examples."""
        members = self._members("validation")
        return members, self._targets(members, self.arrays["validation_labels"](), "validation_labels")

    def predictions(self, calibration: Calibration = cross_validation) -> RunPredictions:
        """Predictions in the form that metrics are computed from. Those on other test sets are read when used."""
        clean = self.clean()

        def read(key: str) -> SetPredictions:
            return SetPredictions(lambda: (self._members(key), clean[1]), self.task, calibration)

        corrupted, ood = dict[str, dict[str, SetPredictions]](), dict[str, SetPredictions]()
        for match in filter(None, map(_TEST_SET.fullmatch, self.arrays)):
            if match["ood"] is not None:
                ood[match["ood"]] = read(match[0])
            else:
                corrupted.setdefault(match["corruption"], {})[match["severity"]] = read(match[0])
        return RunPredictions(SetPredictions(lambda: clean, self.task, calibration), {}, corrupted, ood)

    def _members(self, key: str) -> Tensor:
        logits = "logits" in self.arrays
        with self._named("" if self.bare else key):
            return member_predictions(self.arrays[key](), self.task, logits=logits, advice=self._advice)

    @property
    def _advice(self) -> str:
        """What to do if the predictions are logits."""
        return "pass logits=True" if self.bare else 'name them "logits" instead of "probs"'

    def _targets(self, members: Tensor, labels: Any, key: str) -> Tensor:
        y = as_tensor(labels)
        with self._named(key):
            if not isinstance(y, Tensor):
                raise ValueError(f"must be a tensor or array of numbers, such as np.asarray(labels); got {kind_of(y)}.")
            return self.task.targets(members, y.detach().cpu())

    def _check_names(self) -> None:
        names = ", ".join(self.arrays) or "none"
        if self.task.kind == "regression":
            needed = {"means", "variances"}
            if not needed <= self.arrays.keys():
                raise self._error("", f"regression needs arrays named means and variances; got {names}.")
        else:
            needed = {"probs", "logits"} & self.arrays.keys()
            if len(needed) != 1:
                raise self._error("", f"name the predictions on the test set either probs or logits; got {names}.")
        others = [key for key in self.arrays if key not in needed]
        for key in others:
            if key not in _VALIDATION and _TEST_SET.fullmatch(key) is None:
                known = "corrupted/NAME/SEVERITY, such as corrupted/fog/3, ood/NAME, validation and validation_labels"
                raise self._error(
                    "", f"{key!r} is not the name of a test set; those besides the clean one are {known}."
                )
        if ("validation" in others) != ("validation_labels" in others):
            raise self._error("", "validation and validation_labels belong together; give both or neither.")
        one_class = isinstance(self.task, Classification) and getattr(as_tensor(self.labels), "ndim", 1) == 1
        if others and not one_class:
            raise self._error("", f"{others[0]!r}: only data with one class per example have more than one test set.")

    def _error(self, key: str, message: str) -> ValueError:
        where = ", ".join(filter(None, (self.name, key)))
        return ValueError(f"{where}: {message}" if where else message)

    @contextlib.contextmanager
    def _named(self, key: str) -> Iterator[None]:
        """Add the name of the array to a ValueError."""
        try:
            yield
        except ValueError as error:
            raise self._error(key, str(error)) from error


def _flat(arrays: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, Callable[[], Any]]]:
    for key, value in arrays.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}/")
        else:
            yield f"{before}{key}", partial(_itself, value)


def _itself(value: Any) -> Any:
    return value
