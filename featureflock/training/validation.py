"""Accuracy and NLL in the training loop. Shapes: n members, B examples, C classes."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from featureflock.data import Batch, Examples
from featureflock.ensemble.ensemble import Ensemble, eval_mode
from featureflock.training.compute import ResolvedCompute


class DivergenceError(FloatingPointError):
    """A loss, weight or prediction is not finite."""


@torch.no_grad()
def evaluate_examples(
    ens: Ensemble, examples: Examples, compute: ResolvedCompute, batch_size: int, on_batch: Callable[[Batch], None]
) -> dict[str, Any]:
    """Return accuracy in % and NLL in nats of the ensemble and of each member, on all readable examples.

    `on_batch` is called for each batch, before it is computed.
    """
    device, data = torch.device(compute.device), ens.mesh.data
    order = list(torch.arange(len(examples)).split(batch_size))[data.rank :: data.size]
    dtype = torch.float32 if device.type == "mps" else torch.float64
    totals = torch.zeros(len(ens) + 1, 3, dtype=dtype, device=device)
    with eval_mode(ens):
        for batch in examples.batches(order, device):
            on_batch(batch)
            if not len(batch.y):
                continue
            with compute.computing(len(batch.y) == batch_size):
                logits_nbc = ens(compute.inputs(batch.x))
            log_p_nbc = logits_nbc.float().log_softmax(-1)
            mean_1bc = log_p_nbc.logsumexp(0, keepdim=True) - math.log(len(ens))
            totals += torch.stack([_sums(log_p, batch.y) for log_p in torch.cat([mean_1bc, log_p_nbc])])
    totals = data.sum(totals).cpu()
    count = int(totals[0, 2])
    if not count:
        raise OSError("None of the examples could be read, so there is nothing to evaluate.")
    finite = torch.isfinite(totals[1:]).all(1).tolist()
    if not all(finite):
        member = finite.index(False)
        raise DivergenceError(f"The predictions of member {member} are not finite in evaluation, but were in training.")
    (accuracy, *accuracies), (nll, *nlls) = (totals[:, :2] / count).T.tolist()
    return {
        "examples": count,
        "accuracy": 100 * accuracy,
        "nll": nll,
        "member_accuracy": [100 * a for a in accuracies],
        "member_nll": nlls,
    }


def _sums(log_p_bc: Tensor, y_b: Tensor) -> Tensor:
    """Number of correct predictions, sum of the NLL, and number of examples."""
    correct = (log_p_bc.argmax(-1) == y_b).sum()
    nll = F.nll_loss(log_p_bc, y_b, reduction="sum")
    return torch.stack([correct.to(nll), nll, torch.full_like(nll, len(y_b))])
