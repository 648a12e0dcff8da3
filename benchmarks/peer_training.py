"""One Deep Ensemble trained and used by each library, in its own way, on a stopwatch; see peer_speed.py.

    python benchmarks/peer_training.py LIBRARY SCALE JOB

prints the summary of one run as JSON. Little is imported before the library, because memory counts.
"""

import contextlib
import io
import json
import logging
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from featureflock.models import MLPConfig, WideResNetConfig
from featureflock.models.base import ModelConfig

OURS, PEERS = "featureflock", {"TorchEnsemble": "torchensemble", "TorchUncertainty": "torch-uncertainty"}
CLASSES, BATCH, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 10, 64, 0.05, 0.9, 5e-4
PREDICTIONS = 20
"""Timed predictions of the test set; the fastest counts."""


@dataclass(frozen=True)
class Job:
    """An ensemble for the digits of scikit-learn, enlarged to `size` × `size` images of three channels."""

    model: ModelConfig
    members: int
    epochs: int
    accuracy: float
    """Test accuracy in % that the time to accuracy ends with."""
    size: int

    def data(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Training and test images, training and test labels."""
        x, y = load_digits(return_X_y=True)
        images = torch.tensor(x / 16).float().view(-1, 1, 8, 8)
        images = images.repeat_interleave(self.size // 8, 2).repeat_interleave(self.size // 8, 3)
        x, x_test, y, y_test = train_test_split(
            images.repeat(1, 3, 1, 1), torch.tensor(y), test_size=0.5, random_state=0
        )
        whole = len(y) // BATCH * BATCH  # the statistics of BatchNorm would suffer from a last batch of two
        return x[:whole], x_test, y[:whole], y_test

    def network(self) -> nn.Module:
        extractor = self.model.extractor((3, self.size, self.size))
        return nn.Sequential(extractor, self.model.head(extractor, CLASSES))


JOBS = {
    "quick": {"MLP × 2": Job(MLPConfig((16,)), 2, 4, 50.0, 8)},
    "usual": {
        "MLP × 5": Job(MLPConfig((128, 32)), 5, 30, 95.0, 8),
        "WRN-10-1 × 4": Job(WideResNetConfig(10, 1), 4, 8, 95.0, 32),
    },
}
JOBS["full"] = {**JOBS["usual"], "WRN-16-4 × 4": Job(WideResNetConfig(16, 4), 4, 8, 95.0, 32)}


@dataclass
class Stopwatch:
    """Wall and CPU seconds, without those while it is paused, at the end of each epoch."""

    now: Callable[[], tuple[float, float]] = lambda: (time.perf_counter(), _cpu_time())
    epochs: list[tuple[float, float]] = field(default_factory=list)
    _since: tuple[float, float] = (0.0, 0.0)
    _before: tuple[float, float] = (0.0, 0.0)

    def start(self) -> None:
        self._since = self.now()

    def elapsed(self) -> tuple[float, float]:
        wall, cpu = self.now()
        return self._before[0] + wall - self._since[0], self._before[1] + cpu - self._since[1]

    def end_of_epoch(self) -> None:
        """Record the time and pause until the next `start`."""
        self._before = self.elapsed()
        self.epochs.append(self._before)


def _cpu_time() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@dataclass
class Training:
    """The record of one training run; each library fills it in."""

    job: Job
    watch: Stopwatch = field(default_factory=Stopwatch)
    accuracies: list[float] = field(default_factory=list)
    predict: Callable[[Tensor], Tensor] = lambda x: x
    """The averaged probabilities (B, C), as fast as the library makes them."""


def declare_torchvision_operators() -> None:
    """Make torchvision importable where its compiled operators do not load, as beside a CPU build of PyTorch.

    The import registers functions for two operators, which must be declared. None of the blocks uses torchvision.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except ImportError:
        pass


def train_featureflock(run: Training, compile: bool | None = None) -> None:
    import featureflock as ff
    from featureflock.cpu_kernels.malloc import reuse_freed_memory
    from featureflock.data import CustomData
    from featureflock.methods import DeepEnsembles
    from featureflock.training import ComputeConfig, Recipe, Reporter, train

    class Record(Reporter):
        def evaluating(self, name: str) -> None:
            if len(run.watch.epochs) < run.job.epochs:  # one more evaluation ends the run
                run.watch.end_of_epoch()

        def epoch(self, line: dict[str, Any]) -> None:
            run.accuracies.append(line["test"]["accuracy"])
            run.watch.start()

    job, (x, x_test, y, y_test) = run.job, run.job.data()
    reuse_freed_memory()  # as `featureflock train` does
    optimiser = {"learning_rate": LEARNING_RATE, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY, "nesterov": True}
    recipe = Recipe(
        CustomData((x, y), (x_test, y_test)),
        job.model,
        DeepEnsembles(),
        members=job.members,
        epochs=job.epochs,
        batch=BATCH,
        **optimiser,
    )
    with tempfile.TemporaryDirectory() as folder:
        train(recipe, Path(folder, "run"), compute=ComputeConfig(test_every=1), reporter=Record())
        run.predict = ff.load(Path(folder, "run", "ensemble")).for_inference(compile=compile).predict


def train_torchensemble(run: Training) -> None:
    from torchensemble import VotingClassifier

    job, (x, x_test, y, y_test) = run.job, run.job.data()

    class Network(nn.Module):  # as a class, because an instance would give all members the same initial weights
        def __init__(self) -> None:
            super().__init__()
            self.network = job.network()

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x)

    class Record(VotingClassifier):
        def train(self, mode: bool = True) -> "Record":
            """`fit` calls it before each epoch."""
            if mode and len(self.estimators_):
                record()
            return super().train(mode)

    def record() -> None:
        run.watch.end_of_epoch()
        run.accuracies.append(_accuracy(model.predict(x_test), y_test))
        run.watch.start()

    loader = DataLoader(TensorDataset(x, y), BATCH, shuffle=True)
    model = Record(estimator=Network, n_estimators=job.members, cuda=False)
    model.set_optimizer("SGD", lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True)
    model.fit(loader, epochs=job.epochs, save_model=False)
    record()
    run.predict = model.predict


def train_torch_uncertainty(run: Training) -> None:
    from lightning import Callback
    from torch_uncertainty import TUTrainer
    from torch_uncertainty.methods import deep_ensembles
    from torch_uncertainty.routines import ClassificationRoutine
    from torch_uncertainty.transforms import RepeatTarget

    job, (x, x_test, y, y_test) = run.job, run.job.data()

    @torch.no_grad()
    def predict(x: Tensor) -> Tensor:
        return model(x).view(job.members, -1, CLASSES).softmax(-1).mean(0)

    class Record(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            run.watch.end_of_epoch()
            model.eval()
            run.accuracies.append(_accuracy(predict(x_test), y_test))
            model.train()
            run.watch.start()

    loader = DataLoader(TensorDataset(x, y), BATCH, shuffle=True)
    model = deep_ensembles([job.network() for _ in range(job.members)])
    # The loss is the mean over members, which divides gradients by their number; this makes up for it.
    rates = {"lr": job.members * LEARNING_RATE, "weight_decay": WEIGHT_DECAY / job.members}
    routine = ClassificationRoutine(
        model,
        num_classes=CLASSES,
        loss=nn.CrossEntropyLoss(),
        is_ensemble=True,
        format_batch_fn=RepeatTarget(job.members),
        optim_recipe=torch.optim.SGD(model.parameters(), momentum=MOMENTUM, nesterov=True, **rates),
    )
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    TUTrainer(accelerator="cpu", max_epochs=job.epochs, callbacks=[Record()], **off).fit(routine, loader)
    model.eval()
    run.predict = predict


TRAIN = {OURS: train_featureflock, "TorchEnsemble": train_torchensemble, "TorchUncertainty": train_torch_uncertainty}
IMPORTS = {
    OURS: ("featureflock.training",),
    "TorchEnsemble": ("torchensemble",),
    "TorchUncertainty": ("lightning", "torch_uncertainty.methods", "torch_uncertainty.routines"),
}


def run_library(library: str, job: Job) -> dict[str, Any]:
    """Train and predict in this process. Without the library, only `missing`, the reason."""
    torch.manual_seed(0)
    logging.disable(logging.WARNING)
    run = Training(job)
    run.watch.start()
    if library == "TorchUncertainty":
        declare_torchvision_operators()
    try:
        for name in IMPORTS[library]:
            __import__(name)
    except ImportError as error:
        return {"missing": str(error)}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        TRAIN[library](run)
        trained = _peak_memory()
        x = job.data()[1]
        run.predict(x)
        taken = [_timed(lambda: run.predict(x)) for _ in range(PREDICTIONS)]
    steps = -(-len(job.data()[0]) // BATCH) * (job.epochs - 1)
    summary: dict[str, Any] = {"accuracies": run.accuracies, "peak_memory": trained}
    for i, clock in enumerate(("wall", "cpu")):
        ends = [times[i] for times in run.watch.epochs]
        summary[clock] = {
            "epoch_ends": ends,
            "step": (ends[-1] - ends[0]) / steps,
            "to_accuracy": time_to(job.accuracy, ends, run.accuracies),
            "examples_per_second": len(x) / min(times[i] for times in taken),
        }
    return summary


def time_to(accuracy: float, ends: list[float], accuracies: list[float]) -> float | None:
    """Time at the end of the first epoch with at least this accuracy; None if there is none."""
    return next((end for end, found in zip(ends, accuracies, strict=True) if found >= accuracy), None)


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    watch = Stopwatch()
    watch.start()
    call()
    return watch.elapsed()


def _accuracy(probs: Tensor, y: Tensor) -> float:
    return 100 * float((probs.argmax(-1) == y).float().mean())


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    print(json.dumps(run_library(sys.argv[1], JOBS[sys.argv[2]][sys.argv[3]])))
