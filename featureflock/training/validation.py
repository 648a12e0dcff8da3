"""How well an ensemble predicts: accuracy and negative log-likelihood of its averaged probabilities and of each member.

Shapes: n members, B examples, C classes.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from featureflock.data import Batch, Examples
from featureflock.ensemble.ensemble import Ensemble
from featureflock.training.compute import ResolvedCompute


class DivergenceError(FloatingPointError):
    """A number that should be finite is not."""


@torch.no_grad()
def measure(
    ens: Ensemble, examples: Examples, setup: ResolvedCompute, size: int, on_batch: Callable[[Batch], None]
) -> dict[str, Any]:
    """Accuracy in % and NLL in nats of the ensemble, and of each member, on all examples.

    In batches of `size`, for each of which `on_batch` is called.
    """
    device, parts = torch.device(setup.device), ens.mesh.data
    order = list(torch.arange(len(examples)).split(size))[parts.rank :: parts.size]
    exact = torch.float32 if device.type == "mps" else torch.float64
    totals = torch.zeros(len(ens) + 1, 3, dtype=exact, device=device)
    training = ens.training
    ens.eval()
    try:
        for batch in examples.batches(order, device):
            on_batch(batch)
            if not len(batch.y):
                continue
            with setup.computing(len(batch.y) == size):
                logits_nbc = ens(setup.inputs(batch.x))
            log_p_nbc = logits_nbc.float().log_softmax(-1)
            mixed_1bc = log_p_nbc.logsumexp(0, keepdim=True) - math.log(len(ens))
            totals += torch.stack([_sums(log_p, batch.y) for log_p in torch.cat([mixed_1bc, log_p_nbc])])
    finally:
        ens.train(training)
    totals = parts.sum(totals).cpu()
    count = int(totals[0, 2])
    if not count:
        raise OSError("None of the examples could be read, so nothing could be measured.")
    bad = [i for i, row in enumerate(torch.isfinite(totals[1:]).all(1).tolist()) if not row]
    if bad:
        raise DivergenceError(
            f"In evaluation the predictions of member {bad[0]} are not finite, though they were in training."
        )
    (accuracy, *accuracies), (nll, *nlls) = (totals[:, :2] / count).T.tolist()
    return {
        "examples": count,
        "accuracy": 100 * accuracy,
        "nll": nll,
        "member_accuracy": [100 * a for a in accuracies],
        "member_nll": nlls,
    }


def _sums(log_p_bc: Tensor, y_b: Tensor) -> Tensor:
    """Correct answers, NLL, and examples."""
    correct = (log_p_bc.argmax(-1) == y_b).sum()
    nll = F.nll_loss(log_p_bc, y_b, reduction="sum")
    return torch.stack([correct.to(nll), nll, torch.full_like(nll, len(y_b))])
