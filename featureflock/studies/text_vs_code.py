"""The paper's text against its authors' code, which differ in the subspace and in the bandwidth of the kernel.

The row without repulsion has the shared head and the prior only; the difference from it is the effect of repulsion.
"""

from dataclasses import replace

from featureflock.core.kernels import RBF
from featureflock.methods import DeepEnsembles, FeatureMAP, FeatureWGD
from featureflock.studies.study import PAPER, STUDIES, Row, Study
from featureflock.training import RECIPES

_BASE = RECIPES["cifar10-wrn16x4"].recipe
_PRIOR = FeatureWGD().prior

STUDIES.add(
    "text-vs-code",
    Study(
        "feature-WGD as in the paper's text (dominant, median) and in its code (weakest, official)",
        (
            Row("Deep Ensembles", replace(_BASE, method=DeepEnsembles())),
            Row("no repulsion", replace(_BASE, method=FeatureMAP(_PRIOR))),
            *(
                Row(
                    f"{subspace}, {kernel.bandwidth}",
                    replace(_BASE, method=FeatureWGD(_PRIOR, kernel, subspace=subspace)),
                )
                for subspace in ("dominant", "weakest")
                for kernel in (RBF("median"), RBF("official"))
            ),
        ),
        (*PAPER, "member_accuracy", "disagreement"),
    ),
)
