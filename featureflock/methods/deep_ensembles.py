"""Deep Ensembles (Lakshminarayanan et al., 2017): independent networks that differ only in their initial weights.

    loss = Σ_i loss_i          the mean loss of each member, such as its cross-entropy

Nothing is shared and the losses are summed, so each member gets the gradient that it would get if it were trained
alone. In sequential execution the trained weights are bit-identical to those of separate training runs. Dropout is the
exception: all members draw their masks from one random stream, so masks differ from those of separate runs.
"""

from dataclasses import dataclass

from torch import Tensor

from featureflock.ensemble.ensemble import Ensemble
from featureflock.methods.base import METHODS, LossOutput, Method


@METHODS.register("deep-ensembles")
@dataclass(frozen=True)
class DeepEnsembles(Method):
    """Independent networks, each trained by maximum likelihood."""

    title = "Deep Ensembles"

    def loss(self, ens: Ensemble, x: Tensor, y: Tensor) -> LossOutput:
        ens.task.check_targets(y)
        outputs = ens(x)
        return LossOutput(ens.task.losses(outputs, y, ens.log_variance).sum(), outputs)
