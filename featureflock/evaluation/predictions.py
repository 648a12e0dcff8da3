"""Member predictions on each test set, computed once and cached in the run folder.

    RUN/predictions/<test set>.safetensors      log_probs float32 (n, B, C), labels (B,), positions (B,), asked (·)

`log_probs` are the members' predictions as the task of the run defines them: log-probabilities for classification.

Files are written atomically, so an interrupted evaluation resumes where it stopped. A file is valid for the weights and
the test set that it names, if its content matches its digest, which is verified once per process and file. A file with
more examples than needed is used too. `asked` has the positions of all examples requested, also of unreadable ones.

Shapes: n members, B examples, C classes.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
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
from featureflock.utils.files import check_regular, clear_partials, write_atomically

_FORMAT = "featureflock predictions 1"
_BATCH = 256
_VERIFIED: set[tuple[str, int, int, int]] = set()
"""Path, inode, size and time of files whose content matched their digest in this process."""

ExampleCallback = Callable[[int], None]
"""Called with the number of examples just done."""


class Predictions(NamedTuple):
    """Member predictions on some examples of a test set."""

    log_probs: Tensor
    """(n, B, C); for other tasks than classification `Task.member_predictions`."""
    labels: Tensor
    """(B,), or other targets (B, …)."""
    positions: Tensor
    """Positions of the examples in the test set, (B,), increasing."""


class Predictor:
    """A run's ensemble, loaded when it is first needed."""

    def __init__(
        self,
        run: TrainedRun,
        compute: ComputeConfig = ComputeConfig(),
        load_ensemble: Callable[[], Ensemble] | None = None,
    ) -> None:
        self.run, self._config, self._load = run, compute, load_ensemble or run.load_ensemble

    @cached_property
    def _loaded(self) -> tuple[Ensemble, ResolvedCompute]:
        ens = self._load()
        compute = resolve_compute(self._config, self.run.recipe["precision"], ens, lambda: 0.0)
        return compute.prepare(ens).eval(), compute

    @property
    def ensemble(self) -> Ensemble:
        """The ensemble in eval mode, on the device."""
        return self._loaded[0]

    @property
    def compute(self) -> ResolvedCompute:
        """Device, precision and memory format, resolved for this ensemble."""
        return self._loaded[1]

    @torch.no_grad()
    def log_probs(self, examples: Examples, tick: ExampleCallback = lambda done: None) -> Predictions:
        """Predictions of every member; unreadable examples are left out."""
        ens, compute = self.ensemble, self.compute
        parts = []
        for positions, batch in readable_batches(examples, _BATCH, torch.device(compute.device)):
            if len(batch.y):
                with compute.computing(len(batch.y) == _BATCH):
                    outputs = ens(compute.inputs(batch.x))
                members = ens.task.member_predictions(outputs.float(), ens.log_variance)
                parts.append(Predictions(members.cpu(), batch.y.cpu(), positions))
            tick(len(positions))
        if not parts:
            raise OSError("None of the examples could be read, so nothing could be predicted.")
        log_p, labels, places = zip(*parts, strict=True)
        log_probs = torch.cat(log_p, 1)
        bad = (~torch.isfinite(log_probs)).flatten(1).any(1).nonzero()
        if len(bad):
            raise DivergenceError(f"The predictions of member {int(bad[0])} of {self.run} are not finite.")
        return Predictions(log_probs, torch.cat(labels), torch.cat(places))


def has_predictions(run: TrainedRun, test_set: EvaluationSet) -> bool:
    """Whether valid predictions on all examples of the test set are cached."""
    cached = read_cache(run, test_set.name, test_set.identity, ("asked",))
    return cached is not None and bool(torch.isin(test_set.positions, cached["asked"]).all())


def load_predictions(run: TrainedRun, test_set: EvaluationSet) -> Predictions:
    """The cached predictions."""
    tensors = read_cache(run, test_set.name, test_set.identity, (*Predictions._fields, "asked"))
    if tensors is None or not torch.isin(test_set.positions, tensors["asked"]).all():
        raise ValueError(f"{run} has no predictions on {test_set.name}; evaluate it first.")
    log_probs, labels, positions, _ = tensors.values()
    mask = torch.isin(positions, test_set.positions)
    return Predictions(log_probs[: run.first_members, mask], labels[mask], positions[mask])


def predict(predictor: Predictor, test_set: EvaluationSet, tick: ExampleCallback = lambda done: None) -> Predictions:
    """Compute predictions on a test set."""
    predicted = predictor.log_probs(test_set.load(test_set.positions), tick)
    return predicted._replace(positions=test_set.positions[predicted.positions])


def store_predictions(run: TrainedRun, test_set: EvaluationSet, predictions: Predictions) -> None:
    """Cache predictions in the run folder, unless another process has done so meanwhile."""
    if not has_predictions(run, test_set):
        asked = test_set.positions.clone()
        write_cache(run, test_set.name, test_set.identity, {**predictions._asdict(), "asked": asked})


def write_cache(run: TrainedRun, name: str, identity: str, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a cache file of the run, atomically."""
    folder = run.folder.predictions
    try:
        folder.mkdir(exist_ok=True)
        clear_partials(folder)
        metadata = _metadata(run, identity) | {"sha256": _digest(tensors)}
        write_atomically(folder / f"{name}.safetensors", safetensors.torch.save(tensors, metadata))
    except OSError as error:
        what = f"{folder} could not be written to: {error.strerror or error}"
        raise OSError(f"{what}. Free some space or change its permissions, then run the command again.") from error


def read_cache(run: TrainedRun, name: str, identity: str, names: Sequence[str]) -> dict[str, Tensor] | None:
    """Tensors of a cache file; None if it is missing, damaged, or belongs to other weights or another test set."""
    path = run.folder.predictions / f"{name}.safetensors"
    try:
        check_regular(path)
        stat = path.stat()
        version = str(path.absolute()), stat.st_ino, stat.st_size, stat.st_mtime_ns
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            digest = metadata.pop("sha256", "")
            if metadata != _metadata(run, identity):
                return None
            if version not in _VERIFIED:
                if digest != _digest({each: file.get_tensor(each) for each in file.keys()}):  # noqa: SIM118
                    return None
                _VERIFIED.add(version)
            return {each: file.get_tensor(each).clone() for each in names}  # a copy: the file may be replaced
    except (OSError, ValueError, KeyError, safetensors.SafetensorError):
        return None


def readable_batches(examples: Examples, size: int, device: torch.device) -> Iterator[tuple[Tensor, Batch]]:
    """Batches of all readable examples, with their positions."""
    order = list(torch.arange(len(examples)).split(size))
    for positions, batch in zip(order, examples.batches(order, device), strict=True):
        if batch.unreadable:
            one_by_one = examples.batches([position[None] for position in positions], torch.device("cpu"))
            positions = positions[torch.tensor([len(one.y) > 0 for one in one_by_one])]
        yield positions, batch


def _metadata(run: TrainedRun, identity: str) -> dict[str, str]:
    return {"format": _FORMAT, "weights": run.weights, "condition": identity}


def _digest(tensors: Mapping[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.contiguous().numpy().data)
    return sha.hexdigest()
