"""Not in the paper: its text against its authors' code, which differ in the subspace and in the kernel's bandwidth.

Without repulsion, the shared head and the prior are left: what the others do better than that, repulsion does.
"""

from dataclasses import replace

from featureflock.core.kernels import RBF
from featureflock.methods import DeepEnsembles, FeatureMAP, FeatureWGD
from featureflock.studies.study import CLEAN, CORRUPTED, Row, Study
from featureflock.training import RECIPES

_OURS = RECIPES["cifar10-wrn16x4"].recipe
_PRIOR = FeatureWGD().prior

STUDY = Study(
    "feature-WGD as the paper's text has it (dominant, median) and as its code does (weakest, official)",
    (
        Row("Deep Ensembles", replace(_OURS, method=DeepEnsembles())),
        Row("no repulsion", replace(_OURS, method=FeatureMAP(_PRIOR))),
        *(
            Row(
                f"{subspace}, {bandwidth}",
                replace(_OURS, method=FeatureWGD(_PRIOR, kernel=RBF(bandwidth), subspace=subspace)),
            )
            for subspace in ("dominant", "weakest")
            for bandwidth in ("median", "official")
        ),
    ),
    (*CLEAN, *CORRUPTED, "member_accuracy", "disagreement"),
    seeds=5,
)
