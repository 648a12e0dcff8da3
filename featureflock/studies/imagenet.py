"""Three methods on ImageNet, five ResNet-50 each."""

from featureflock.methods import DeepEnsembles, Single
from featureflock.studies.study import PAPER, STUDIES, Study, method_rows
from featureflock.training import RECIPES

_BASE = RECIPES["imagenet-resnet50"].recipe
_NUMBERS = {
    Single(): "75.7 | 0.954 | 0.338 | 0.018 | 37.7 | 3.235 | 0.738 | 0.021",
    DeepEnsembles(): "78.0 | 0.853 | 0.309 | 0.019 | 40.9 | 3.011 | 0.706 | 0.015",
    _BASE.method: "78.0 | 0.859 | 0.309 | 0.015 | 42.4 | 2.923 | 0.693 | 0.018",
}
_TITLE = "ResNet-50 × 5 on ImageNet, clean and corrupted"
STUDIES.add("imagenet", Study(_TITLE, method_rows(_BASE, _NUMBERS), PAPER, seeds=1, source="Table 3"))
