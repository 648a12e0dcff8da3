"""Lightning: an ensemble as a LightningModule.

    from featureflock.integrations import FlockModule

    module = FlockModule(extractors, nn.Linear(32, 10), method=FeatureWGD())
    trainer = Trainer(max_epochs=10, accumulate_grad_batches=4, precision="bf16-mixed", strategy="ddp", devices=2)
    trainer.fit(module, train_loader, validation_loader)
    predictions = trainer.predict(module, test_loader)         # calibrated, averaged over members

The update of a step is that of the whole batch, also if the batch is divided among processes and micro-batches
(batch_loss.py). Checkpoints include the random state, so training resumes bit-identically after an epoch.

Shapes: n members, B examples.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from featureflock.ensemble.ensemble import Ensemble
from featureflock.ensemble.inputs import inputs_of, split_batch
from featureflock.ensemble.sharing import SharedMembers
from featureflock.integrations.as_ensemble import as_ensemble
from featureflock.integrations.batch_loss import BatchLoss, check_data_parallel
from featureflock.integrations.chained_optimiser import ChainedOptimiser
from featureflock.methods import FeatureWGD, Method
from featureflock.tasks import Task

try:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ImportError as error:
    message = 'FlockModule needs Lightning, which is not installed; run pip install "featureflock[lightning]".'
    raise ImportError(message) from error

_RNG = "featureflock_random_state"


class FlockModule(LightningModule):
    """An ensemble that Lightning trains, evaluates and predicts with.

    Batches are pairs (inputs, targets), or mappings with the targets under "labels"; the other entries are keyword
    arguments of the trunk or the extractors. Logged are `train_loss`, and after each validation or test the NLL of the
    ensemble and its score: `val_loss` and `val_accuracy` in %, or `val_rmse`.

    Args:
        members: the extractors, members in one network (`rank_one`, `lora`), or a complete `Ensemble`.
        head: one module for methods that share it, otherwise a list of one per member.
        method: how the ensemble is trained.
        task: the likelihood, such as `tasks.Regression()`; None for classification.
        trunk: a module that all members share, or None.
        train_size: number of training examples; needed by weight-WGD and DICE.
        optimiser: makes the optimiser from a list of parameters.
        scheduler: makes a schedule of learning rates from the optimiser, stepped after each epoch. For other settings,
            override `configure_optimizers`.
    """

    def __init__(
        self,
        members: Ensemble | SharedMembers | Iterable[nn.Module],
        head: nn.Module | Sequence[nn.Module] | None = None,
        *,
        method: Method = FeatureWGD(),
        task: Task | None = None,
        trunk: nn.Module | None = None,
        train_size: int | None = None,
        optimiser: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = partial(torch.optim.AdamW, lr=1e-3),
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    ) -> None:
        super().__init__()
        self.ensemble = as_ensemble(members, head, method, task, trunk, train_size)
        self.method, self.optimiser, self.scheduler = method, optimiser, scheduler
        self._loss = BatchLoss(self.ensemble, method)
        self._totals: Tensor | None = None
        self._random_state: list[dict[str, Any]] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Outputs of each member, (n, B, …)."""
        outputs: Tensor = self.ensemble(*args, **kwargs)
        return outputs

    def configure_optimizers(self) -> Any:
        optimisers = self.method.optimisers(self.ensemble, self.optimiser)
        optimiser = optimisers[0] if len(optimisers) == 1 else ChainedOptimiser(optimisers)
        if self.scheduler is None:
            return optimiser
        return {"optimizer": optimiser, "lr_scheduler": self.scheduler(optimiser)}

    def on_fit_start(self) -> None:
        strategy = self.trainer.strategy
        if not isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
            name = type(strategy).__name__
            raise ValueError(f'FlockModule does not support {name}; use one device, or Trainer(strategy="ddp").')
        if self.trainer.world_size > 1:
            check_data_parallel(self.ensemble, self.method)
        if self._random_state is not None and self.trainer.world_size == len(self._random_state):
            _set_random_state(self._random_state[self.trainer.global_rank])
        self._random_state = None

    def on_train_epoch_start(self) -> None:
        self._loss.clear()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = split_batch(batch)
        last = (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0 or self.trainer.is_last_batch
        loss = self._loss(x, y, last=last)
        if loss.mean is not None:
            self.log("train_loss", loss.mean, prog_bar=True)
        return loss.backward

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._add_scores(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._add_scores(batch)

    def on_validation_epoch_end(self) -> None:
        self._log_scores("val")

    def on_test_epoch_end(self) -> None:
        self._log_scores("test")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """The prediction of the ensemble, averaged over members and calibrated; targets are ignored."""
        return self.ensemble.predict(inputs_of(batch))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        states = [_random_state()]
        if dist.is_available() and dist.is_initialized():
            states *= dist.get_world_size()
            dist.all_gather_object(states, states[0])
        checkpoint[_RNG] = states

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._random_state = checkpoint.get(_RNG)

    def _add_scores(self, batch: Any) -> None:
        """Add the score, the NLL and the number of targets of a batch to the totals."""
        x, y = split_batch(batch)
        ens, task = self.ensemble, self.ensemble.task
        members = task.calibrated(ens.member_predictions(x), ens.calibration)
        score, nll = task.score_terms(members, y).sum(), task.nll(members, y).sum()
        sums = torch.stack([score.to(nll), nll, torch.as_tensor(task.count(y)).to(nll)]).float()
        self._totals = sums if self._totals is None else self._totals + sums

    def _log_scores(self, prefix: str) -> None:
        totals, self._totals = self._totals, None
        if totals is None:
            return
        score, nll, count = self.trainer.strategy.reduce(totals, reduce_op="sum").tolist()
        task = self.ensemble.task
        values = {f"{prefix}_loss": nll / count, f"{prefix}_{task.score}": task.score_from(score / count)}
        self.log_dict(values, prog_bar=True, sync_dist=True)


def _random_state() -> dict[str, Any]:
    """The state of all global random generators, of types that torch.load accepts."""
    kind, keys, *position = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [kind, np.asarray(keys).tolist(), *position],
        "python": random.getstate(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    if len(state["cuda"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0):
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
    kind, keys, *position = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *position))  # noqa: NPY002
    version, values, gauss = state["python"]
    random.setstate((version, tuple(values), gauss))
