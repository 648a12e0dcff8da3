"""Each member's probabilities on each test set, computed once and kept beside the run.

    RUN/predictions/<test set>.safetensors      log_probs float32 (n, B, C), labels (B,), positions (B,), asked (·)

A file is written whole or not at all, so an interrupted evaluation goes on where it was. It holds good for the weights
and the test set that it names, while its content is what its digest stands for; of more examples than are asked for,
those that are asked for are used.

Shapes: n members, B examples, C classes.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from featureflock.data import Batch, Examples
from featureflock.ensemble.ensemble import Ensemble
from featureflock.evaluation.runs import TrainedRun
from featureflock.evaluation.test_sets import EvaluationSet
from featureflock.training.compute import ComputeConfig, ResolvedCompute, resolve_compute
from featureflock.training.validation import DivergenceError
from featureflock.utils.files import clear_partials, write_atomically

_FORMAT = "featureflock predictions 1"
_BATCH = 256

Tick = Callable[[int], None]
"""Is told how many more examples are done."""


class Predictions(NamedTuple):
    log_probs: Tensor
    """(n, B, C)."""
    labels: Tensor
    """(B,)."""
    positions: Tensor
    """Of the examples in their set, (B,), rising."""

    def at(self, positions: Tensor) -> "Predictions":
        """Only those at these positions."""
        if torch.equal(self.positions, positions):
            return self
        held = torch.isin(self.positions, positions)
        return Predictions(self.log_probs[:, held], self.labels[held], self.positions[held])


class Predictor:
    """A run's ensemble, loaded when it is first needed."""

    def __init__(self, run: TrainedRun, compute: ComputeConfig = ComputeConfig(), ens: Ensemble | None = None) -> None:
        self.run, self.compute = run, compute
        self._ens = ens
        self._setup: ResolvedCompute | None = None

    @property
    def ensemble(self) -> Ensemble:
        """In eval mode, on the device."""
        self.setup  # noqa: B018 — prepares it
        assert self._ens is not None
        return self._ens

    @property
    def setup(self) -> ResolvedCompute:
        if self._setup is None:
            ens = self.run.load_ensemble() if self._ens is None else self._ens
            self._setup = resolve_compute(self.compute, self.run.recipe["precision"], ens, lambda: 0.0)
            self._ens = self._setup.prepare(ens).eval()
        return self._setup

    @torch.no_grad()
    def log_probs(self, examples: Examples, tick: Tick = lambda done: None) -> Predictions:
        """Of every member on examples; those that cannot be read are left out."""
        ens, setup = self.ensemble, self.setup
        parts = []
        for positions, batch in batches_of(examples, _BATCH, torch.device(setup.device)):
            if len(batch.y):
                with setup.computing(len(batch.y) == _BATCH):
                    logits = ens(setup.inputs(batch.x))
                parts.append(Predictions(logits.float().log_softmax(-1).cpu(), batch.y.cpu(), positions))
            tick(len(positions))
        if not parts:
            raise OSError("None of the examples could be read, so nothing could be predicted.")
        log_p, labels, places = zip(*parts, strict=True)
        log_probs = torch.cat(log_p, 1)
        bad = (~torch.isfinite(log_probs)).any(-1).any(-1).nonzero()
        if len(bad):
            raise DivergenceError(f"The predictions of member {int(bad[0])} of {self.run} are not finite.")
        return Predictions(log_probs, torch.cat(labels), torch.cat(places))


def has_predictions(run: TrainedRun, condition: EvaluationSet) -> bool:
    """Whether the disk has predictions of these weights on all these examples."""
    asked = kept(run, condition.name, condition.identity, ("asked",))
    return asked is not None and bool(torch.isin(condition.positions, asked["asked"]).all())


def read(run: TrainedRun, condition: EvaluationSet) -> Predictions:
    """The predictions that `predict` has kept."""
    tensors = kept(run, condition.name, condition.identity, (*Predictions._fields, "asked"))
    if tensors is None or not torch.isin(condition.positions, tensors["asked"]).all():
        raise ValueError(f"{run} has no predictions on {condition.name}; evaluate it first.")
    return Predictions(*(tensors[name] for name in Predictions._fields)).at(condition.positions)


def predict(predictor: Predictor, condition: EvaluationSet, tick: Tick = lambda done: None) -> Predictions:
    """Compute what members say of a condition."""
    found = predictor.log_probs(condition.load(condition.positions), tick)
    return found._replace(positions=condition.positions[found.positions])


def store_predictions(run: TrainedRun, condition: EvaluationSet, found: Predictions) -> None:
    """Write them beside the run, unless another process has written as many or more meanwhile."""
    if not has_predictions(run, condition):
        asked = condition.positions.clone()
        keep(run, condition.name, condition.identity, {**found._asdict(), "asked": asked})


def keep(run: TrainedRun, name: str, identity: str, tensors: dict[str, Tensor]) -> None:
    """Write a file beside a run, whole or not at all."""
    folder = run.folder.predictions
    try:
        folder.mkdir(exist_ok=True)
        clear_partials(folder)
        about = _about(run, identity) | {"sha256": _digest(tensors)}
        write_atomically(folder / f"{name}.safetensors", safetensors.torch.save(tensors, about))
    except OSError as error:
        raise OSError(
            f"{folder} could not be written to ({error.strerror or error}); what was written before is sound. Make "
            "room or change its permissions, then give the command again."
        ) from error


def kept(run: TrainedRun, name: str, identity: str, names: Sequence[str]) -> dict[str, Tensor] | None:
    """Tensors of a file beside a run; None if it is missing, damaged, of other weights, or of something else."""
    try:
        with safetensors.safe_open(run.folder.predictions / f"{name}.safetensors", "pt") as file:
            about = file.metadata() or {}
            digest = about.pop("sha256", None)  # files of older versions have none
            if about != _about(run, identity):
                return None
            there = file.keys()
            tensors = {each: file.get_tensor(each).clone() for each in there}  # not the file itself: it may be altered
            if digest not in (None, _digest(tensors)):
                return None
            return {each: tensors[each] for each in names}
    except (OSError, KeyError, safetensors.SafetensorError):
        return None


def _about(run: TrainedRun, identity: str) -> dict[str, str]:
    return {"format": _FORMAT, "weights": run.weights, "condition": identity}


def _digest(tensors: Mapping[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.contiguous().numpy().data)
    return sha.hexdigest()


def batches_of(examples: Examples, size: int, device: torch.device) -> Iterator[tuple[Tensor, Batch]]:
    """All that can be read, with its positions. Where something cannot, its batch is asked one by one."""
    order = list(torch.arange(len(examples)).split(size))
    for positions, batch in zip(order, examples.batches(order, device), strict=True):
        if batch.unreadable:
            one_by_one = examples.batches([position[None] for position in positions], torch.device("cpu"))
            positions = positions[torch.tensor([len(one.y) > 0 for one in one_by_one])]
        yield positions, batch
