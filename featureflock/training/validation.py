"""Scores in the training loop: NLL, and accuracy or RMSE. Shapes: n members, B examples."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from featureflock.data import Batch, Examples
from featureflock.ensemble.ensemble import Ensemble
from featureflock.ensemble.execution import eval_mode
from featureflock.tasks import Task
from featureflock.training.compute import ResolvedCompute


class DivergenceError(FloatingPointError):
    """A loss, weight or prediction is not finite."""


@torch.no_grad()
def evaluate_examples(
    ens: Ensemble, examples: Examples, compute: ResolvedCompute, batch_size: int, on_batch: Callable[[Batch], None]
) -> dict[str, Any]:
    """Return the score of the task (accuracy in %, or RMSE) and the NLL in nats, of the ensemble and of each member.

    All readable examples are used. `on_batch` is called for each batch, before it is computed.
    """
    device, data, task = torch.device(compute.device), ens.mesh.data, ens.task
    order = list(torch.arange(len(examples)).split(batch_size))[data.rank :: data.size]
    dtype = torch.float32 if device.type == "mps" else torch.float64
    totals, count = torch.zeros(len(ens) + 1, 3, dtype=dtype, device=device), 0
    with eval_mode(ens):
        for batch in examples.read_by(ens.mesh.members).batches(order, device):
            on_batch(batch)
            if not len(batch.y):
                continue
            count += len(batch.y)
            with compute.computing(len(batch.y) == batch_size):
                outputs = ens(compute.inputs(batch.x))
            members = task.member_predictions(outputs.float(), ens.log_variance)
            totals += torch.stack([_sums(task, part, batch.y) for part in (members, *members.split(1))]).to(totals)
    count = int(data.sum(torch.tensor(count)))
    totals = data.sum(totals).cpu()
    if not count:
        raise OSError("None of the examples could be read, so there is nothing to evaluate.")
    finite = torch.isfinite(totals[1:]).all(1).tolist()
    if not all(finite):
        member = finite.index(False)
        raise DivergenceError(f"The predictions of member {member} are not finite in evaluation, but were in training.")
    (score, *scores), (nll, *nlls) = (totals[:, :2] / totals[0, 2]).T.tolist()
    return {
        "examples": count,
        task.score: task.score_from(score),
        "nll": nll,
        f"member_{task.score}": [task.score_from(each) for each in scores],
        "member_nll": nlls,
    }


def _sums(task: Task, members: Tensor, y: Tensor) -> Tensor:
    """Sums of the score and of the NLL over the targets, and the number of targets."""
    score, nll = task.score_terms(members, y).sum(), task.nll(members, y).sum()
    return torch.stack([score.to(nll), nll, torch.as_tensor(task.count(y), dtype=nll.dtype, device=nll.device)])
