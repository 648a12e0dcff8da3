"""Calibration of an ensemble of any task on held-out data.

Shapes: n members, B examples.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from featureflock.ensemble.ensemble import Ensemble
from featureflock.ensemble.inputs import split_batch
from featureflock.evaluation.task_scores import fit_calibration


def calibrate(ens: Ensemble, loader: Iterable[tuple[Any, Tensor] | Mapping[str, Any]]) -> float:
    """Fit the calibration of an ensemble on held-out data and set it on the ensemble.

        T = calibrate(ens, validation_loader)

    For classes and labels it is the temperature T that minimises the NLL of softmax(log p̄ / T), or σ(logit p̄ / T):
    above 1 if the ensemble was overconfident, below 1 if it was underconfident. For regression it is the factor of the
    predictive variance that minimises the NLL. Afterwards `ens.predict` uses it, and `save` stores it.

    Args:
        ens: a trained ensemble.
        loader: batches (inputs, targets) of held-out data, or mappings with the targets under "labels"; members are
            overconfident on their training data.
    """
    if not isinstance(ens, Ensemble):
        raise ValueError(f"calibrate takes an Ensemble; got {type(ens).__name__}.")
    device = next((p.device for p in ens.parameters()), torch.device("cpu"))
    parts = []
    for batch in loader:
        batch = split_batch(batch) if isinstance(batch, Mapping) else batch
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        if not pair or not isinstance(batch[1], Tensor) or not batch[1].dim():  # a Dataset yields single examples
            raise ValueError("calibrate needs batches (inputs, targets), such as labels as a tensor of class indices.")
        x, y = batch
        if len(y):
            members = ens.member_predictions(_to_device(x, device)).double()
            if not torch.isfinite(members).all():
                raise ValueError("The ensemble's predictions are not finite, so there is nothing to calibrate.")
            y = y.to(device)
            ens.task.nll(members, y)  # refuses targets that do not belong to the task
            parts.append((members, y))
    if not parts:
        raise ValueError("The loader gave no batch, so there is nothing to calibrate on.")
    members, targets = (torch.cat(part, dim) for part, dim in zip(zip(*parts, strict=True), (1, 0), strict=True))
    setattr(ens, ens.task.calibration, fit_calibration(ens.task, members, targets))
    return float(ens.calibration)


def _to_device(x: Any, device: torch.device) -> Any:
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {key: _to_device(part, device) for key, part in x.items()}
    return type(x)(_to_device(part, device) for part in x) if type(x) in (tuple, list) else x
