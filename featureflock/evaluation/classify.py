"""Classification of image files by a trained run: class, calibrated probability, member agreement, uncertainty.

    p_T = softmax(log p̄ / T),    agreement = (members that predict the top class) / n

T is the temperature stored with the ensemble, if `featureflock.calibrate` set one. Otherwise it is fitted on the
validation examples of the run, or on the test set if there are none; the user's images are in neither.

Shapes: n members, B images, C classes.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from featureflock.data import TensorExamples
from featureflock.evaluation import test_sets
from featureflock.evaluation.calibration import fit_temperature, tempered
from featureflock.evaluation.cam_cache import compute_maps
from featureflock.evaluation.diversity import mutual_information
from featureflock.evaluation.metrics.classification import average
from featureflock.evaluation.predictions import Predictor, has_predictions, load_predictions, predict, store_predictions
from featureflock.evaluation.runs import TrainedRun
from featureflock.tasks import Classification

ReadImage = tuple[Path, Image.Image, str]
"""Its file, the image in the input format, and a note on its conversion."""


class ClassProbability(NamedTuple):
    """A class and its probability."""

    label: int
    name: str
    probability: float


class ImagePrediction(NamedTuple):
    """Prediction of the ensemble for one image."""

    path: Path
    top: tuple[ClassProbability, ...]
    """Most probable classes, in order; probabilities are calibrated."""
    members: tuple[ClassProbability, ...]
    """Most probable class of each member, with its probability before calibration."""
    mutual_information: float
    """Epistemic uncertainty in nats, from 0 if all members predict the same to log n."""
    note: str
    """How the image was converted to the input format, if at all."""

    @property
    def agreeing(self) -> int:
        """Number of members that predict the ensemble's top class."""
        return sum(member.label == self.top[0].label for member in self.members)


class RunClassifier:
    """A trained run that classifies image files."""

    def __init__(self, run: TrainedRun, predictor: Predictor, log: Callable[[str], None]) -> None:
        self.predictor, self.format = predictor, run.inputs
        self.format.check()
        task = predictor.ensemble.task
        if task.kind != Classification.kind:
            advice = "in Python, featureflock.load gives its ensemble, and predict(x) its prediction"
            raise ValueError(f"featureflock predict shows one class per image; this run is for {task.name}: {advice}.")
        self.temperature, self.calibrated_on = run_temperature(run, predictor, log)

    def classify(self, read: Sequence[ReadImage], top: int = 3) -> list[ImagePrediction]:
        """Predictions for images, with the `top` most probable classes. Images are read by `format.read`."""
        log_p_nbc, predictions = self.predictor.log_probs(self._examples(read)).log_probs, []
        p_bc, p_nbc = tempered(average(log_p_nbc), self.temperature).exp(), log_p_nbc.double().exp()
        information_b = mutual_information(p_nbc)
        for b, (path, _, note) in enumerate(read):
            order = p_bc[b].argsort(descending=True, stable=True)[:top]
            classes = tuple(self._class(int(k), p_bc[b]) for k in order)
            members = tuple(self._class(int(p_c.argmax()), p_c) for p_c in p_nbc[:, b])
            predictions.append(ImagePrediction(path, classes, members, information_b[b].item(), note))
        return predictions

    def maps(self, read: Sequence[ReadImage]) -> Tensor:
        """Class activation maps (n, B, h, w) of the images."""
        return compute_maps(self.predictor, self._examples(read)).maps

    def _examples(self, read: Sequence[ReadImage]) -> TensorExamples:
        x = self.format.batch([image for _, image, _ in read])
        return TensorExamples(x, torch.zeros(len(x), dtype=torch.int64))

    def _class(self, label: int, p_c: Tensor) -> ClassProbability:
        return ClassProbability(label, self.format.name(label), p_c[label].item())


def run_temperature(run: TrainedRun, predictor: Predictor, log: Callable[[str], None]) -> tuple[float, str]:
    """The temperature, and what it was fitted on; 1 and "" if the data are not available."""
    if (stored := float(predictor.ensemble.calibration)) != 1:
        return stored, "user-provided data"
    try:
        splits = run.splits()
    except (OSError, ValueError) as error:
        log(f"Probabilities are not calibrated, because the data are not available: {error}")
        return 1.0, ""
    validation = test_sets.validation(splits, run.recipe)
    test_set = validation or test_sets.clean(splits)
    description = f"{len(test_set.positions):,} {'validation' if validation else 'test'} examples"
    if has_predictions(run, test_set):
        predictions = load_predictions(run, test_set)
    else:
        log(f"Calibrating on {description}; the result is cached.")
        predictions = predict(predictor, test_set)
        try:
            store_predictions(run, test_set, predictions)
        except OSError as error:
            log(f"The predictions could not be cached: {error}")
    return fit_temperature(average(predictions.log_probs), predictions.labels), description
