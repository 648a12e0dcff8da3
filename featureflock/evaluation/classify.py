"""A trained run's opinion of a user's pictures: label, calibrated probability, and how much its members agree.

    p_T = softmax(log p̄ / T),    agreement = (members that name the label) / n

T is the ensemble's own if `featureflock.calibrate` gave it one. Otherwise it is fitted on the examples that were held
out of training, or on the test set where none were: pictures of the user's are in neither.

Shapes: n members, B pictures, C classes.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from featureflock.data import InputFormat, TensorExamples
from featureflock.evaluation import test_sets
from featureflock.evaluation.calibration import fit_temperature, tempered
from featureflock.evaluation.cam_cache import compute_maps
from featureflock.evaluation.diversity import mutual_information
from featureflock.evaluation.metrics.classification import average
from featureflock.evaluation.predictions import Predictor, has_predictions, load_predictions, predict, store_predictions
from featureflock.evaluation.runs import TrainedRun


class ClassProbability(NamedTuple):
    label: int
    name: str
    probability: float


class ImagePrediction(NamedTuple):
    """What the ensemble says of one picture."""

    path: Path
    guesses: tuple[ClassProbability, ...]
    """The most probable classes, the first of which is the answer; probabilities are calibrated."""
    members: tuple[ClassProbability, ...]
    """What each member would say by itself, and its own probability of that."""
    mutual_information: float
    """In nats, from 0 where all members say the same to log n."""
    note: str
    """What was done to the picture to make it fit, if anything."""

    @property
    def votes(self) -> int:
        """How many members name the answer."""
        return sum(guess.label == self.guesses[0].label for guess in self.members)


class RunClassifier:
    """A run, ready to be asked."""

    def __init__(self, run: TrainedRun, predictor: Predictor, say: Callable[[str], None]) -> None:
        self.predictor = predictor
        self.format = _input_format(run)
        self.format.check()
        self.temperature, self.calibrated_on = _temperature(run, predictor, say)

    def read(self, path: Path) -> tuple[Image.Image, str]:
        """A picture as the network sees it, and what was done to it; what cannot be read is refused in a sentence."""
        return self.format.read(path)

    def classify(self, read: Sequence[tuple[Path, Image.Image, str]], top: int = 3) -> list[ImagePrediction]:
        """Answers on pictures that `read` gave."""
        log_p_nbc = self.predictor.log_probs(self._examples(read)).log_probs
        p_bc = tempered(average(log_p_nbc), self.temperature).exp()
        p_nbc, doubt_b = log_p_nbc.double().exp(), mutual_information(log_p_nbc.double().exp())
        answers = []
        for b, (path, _, note) in enumerate(read):
            order = p_bc[b].argsort(descending=True, stable=True)[:top]
            guesses = tuple(self._guess(int(k), p_bc[b]) for k in order)
            members = tuple(self._guess(int(p_c.argmax()), p_c) for p_c in p_nbc[:, b])
            answers.append(ImagePrediction(path, guesses, members, doubt_b[b].item(), note))
        return answers

    def maps(self, read: Sequence[tuple[Path, Image.Image, str]]) -> Tensor:
        """Class activation maps (n, B, h, w) of the pictures."""
        return compute_maps(self.predictor, self._examples(read)).maps

    def _examples(self, read: Sequence[tuple[Path, Image.Image, str]]) -> TensorExamples:
        x = self.format.batch([picture for _, picture, _ in read])
        return TensorExamples(x, torch.zeros(len(x), dtype=torch.int64))

    def _guess(self, label: int, p_c: Tensor) -> ClassProbability:
        return ClassProbability(label, self.format.name(label), p_c[label].item())


def _input_format(run: TrainedRun) -> InputFormat:
    """As the run keeps it, or from its data where it was trained before runs kept it."""
    path = run.folder.path / "inputs.json"
    if not path.is_file():
        return InputFormat.of(run.data().load())
    value: dict[str, Any] = run.folder.read(path.name)
    try:
        return InputFormat.from_json(value)
    except ValueError as error:
        raise ValueError(f"{path} is damaged; was it altered?") from error


def _temperature(run: TrainedRun, predictor: Predictor, say: Callable[[str], None]) -> tuple[float, str]:
    """The temperature, and what it was fitted on in words; 1 and "" if there is nothing to fit it on."""
    own = predictor.ensemble.temperature
    if own is not None:
        return own, "data of your own"
    recipe = run.recipe
    try:
        splits = run.data().load().split(validation=recipe["validation"], seed=recipe["split_seed"])
    except (OSError, ValueError) as error:
        say(f"Probabilities are not calibrated, for want of the data: {error}")
        return 1.0, ""
    held_out = test_sets.validation(splits)
    condition = held_out or test_sets.clean(splits)
    what = f"{len(condition.positions):,} {'validation' if held_out else 'test'} examples"
    if has_predictions(run, condition):
        there = load_predictions(run, condition)
    else:
        say(f"Calibrating on {what}, once.")
        there = predict(predictor, condition)
        try:
            store_predictions(run, condition, there)
        except OSError as error:
            say(f"It will be done again the next time: {error}")
    return fit_temperature(average(there.log_probs), there.labels), what
