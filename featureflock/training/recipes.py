"""Named recipes: those of the paper (appendix B), and small ones for a laptop.

Appendix B gives one training schedule for each data set, and a prior and a rank for each table. The paper's priors for
weight-WGD and function-WGD are the defaults of those methods. The repulsion of the small recipes is what held-out data
chose, where a search was made (docs/tutorials/choosing.md).
"""

from dataclasses import replace
from typing import NamedTuple

from featureflock.core.priors import Cauchy, Normal, Uniform
from featureflock.data import (
    CIFAR10,
    CIFAR100,
    MNIST,
    Diabetes,
    Diamonds,
    Digits,
    DigitScenes,
    FashionMNIST,
    ImageFolder,
)
from featureflock.methods import FeatureWGD
from featureflock.models import (
    CifarResNetConfig,
    CNNConfig,
    DenseCNNConfig,
    FastCNNConfig,
    MLPConfig,
    ResNetConfig,
    WideResNetConfig,
)
from featureflock.training.recipe import Recipe


class NamedRecipe(NamedTuple):
    """A recipe and a one-line description of it."""

    description: str
    recipe: Recipe


# Batch size 128, learning rate 0.1, decay by 0.1 and weight decay 5e-4 are the defaults of Recipe.
_CIFAR10 = Recipe(
    CIFAR10(), WideResNetConfig(16, 4), FeatureWGD(Cauchy(1e-3)), members=10, epochs=300, decay_epochs=(150, 225)
)
_CIFAR100 = replace(_CIFAR10, data=CIFAR100(), method=FeatureWGD(Cauchy(5e-3)), decay_epochs=(150, 225, 250))
_RESNET50 = Recipe(ImageFolder(), ResNetConfig(50), FeatureWGD(Cauchy(2e-3)), members=5)
_IMAGENET = replace(_RESNET50, epochs=90, batch=256, decay_epochs=(30, 60), weight_decay=1e-4)
_CNN = Recipe(model=CNNConfig(), members=5, epochs=20, decay_epochs=(10, 15))
# An MLP without BatchNorm: at a learning rate of 0.1, some members never learn (docs/notes/decisions.md).
_MLP = Recipe(Digits(), MLPConfig(), members=5, epochs=60, batch=64, decay_epochs=(30, 45), learning_rate=0.03)
# Precision and repulsion have the best accuracy with one half blank on validation images (docs/results/demo.md).
_TWO_VIEWS = replace(
    _MLP,
    data=Digits(views=2),
    model=MLPConfig((64, 32)),
    method=FeatureWGD(Cauchy(3e-3), repulsion=5.0),
    schedule="one-cycle",
    decay_epochs=(),
    learning_rate=0.1,
)
_FAST = Recipe(CIFAR10(padding=2), FastCNNConfig(), members=5, epochs=8, schedule="one-cycle", weight_decay=8e-4)
_LAPTOP = replace(_FAST, data=CIFAR10(padding=0, flip=False), model=FastCNNConfig((8, 32, 64)), subset=5_000)

_SCENES = Recipe(model=CNNConfig(), members=5, epochs=10, batch=64, schedule="one-cycle", learning_rate=0.1)
_DIABETES = Recipe(
    Diabetes(), MLPConfig((32, 16)), members=5, epochs=60, batch=32, schedule="one-cycle", learning_rate=0.003
)
_DIAMONDS = replace(_DIABETES, data=Diamonds(), model=MLPConfig((64, 32)), epochs=10, batch=256)

RECIPES = {
    "digits": NamedRecipe(
        "Built-in 8×8 digits, MLP: takes seconds, nothing to download.", replace(_MLP, method=FeatureWGD(rank=1))
    ),
    "digits-cnn": NamedRecipe(
        "Built-in 8×8 digits, small CNN.",
        replace(_CNN, data=Digits(), batch=64, method=FeatureWGD(rank=1, repulsion=5.0)),
    ),
    "two-view-digits": NamedRecipe(
        "Pairs of digits side by side, each of which determines the class; MLP, repulsion 5.", _TWO_VIEWS
    ),
    "digit-scenes": NamedRecipe(
        "Built-in scenes of one to four digits: the class of each pixel; fully convolutional network.",
        replace(_SCENES, data=DigitScenes("pixels"), model=DenseCNNConfig()),
    ),
    "digit-sets": NamedRecipe(
        "Built-in scenes of one to four digits: which digits are present; small CNN.",
        replace(_SCENES, data=DigitScenes("labels"), epochs=30),
    ),
    "diabetes": NamedRecipe(
        "Built-in regression of disease progression on 442 patients, MLP: takes seconds.", _DIABETES
    ),
    "diamonds": NamedRecipe("Regression of the log price of 53,940 diamonds, MLP: takes minutes.", _DIAMONDS),
    "mnist-cnn": NamedRecipe("MNIST, small CNN.", replace(_CNN, data=MNIST())),
    "fashion-mnist-cnn": NamedRecipe("Fashion-MNIST, small CNN.", replace(_CNN, data=FashionMNIST())),
    "cifar10-small": NamedRecipe(
        "CIFAR-10 in minutes on a laptop: WRN-10-1 × 5, 10,000 images, 8 epochs.",
        replace(_CIFAR10, model=WideResNetConfig(10, 1), members=5, subset=10_000, epochs=8, decay_epochs=(5, 7)),
    ),
    "cifar10-fast": NamedRecipe(
        "CIFAR-10 with few FLOPs: fast CNN × 5, 8 epochs, one-cycle; 90.6 % in about an hour on two cores.",
        replace(_FAST, learning_rate=0.2),
    ),
    "cifar10-laptop": NamedRecipe(
        "CIFAR-10 in two minutes: small fast CNN × 5, 5,000 images, 8 epochs.",
        replace(_LAPTOP, batch=32, learning_rate=0.05),
    ),
    "cifar10-wrn16x4": NamedRecipe("The paper's CIFAR-10: WRN-16-4 × 10.", _CIFAR10),
    "cifar100-wrn16x4": NamedRecipe("The paper's CIFAR-100: WRN-16-4 × 10, Cauchy prior of precision 5e-3.", _CIFAR100),
    "cifar100-wrn16x4-normal": NamedRecipe(
        "The paper's comparison of priors: normal, precision 5e-3.", replace(_CIFAR100, method=FeatureWGD(Normal(5e-3)))
    ),
    "cifar100-wrn16x4-uniform": NamedRecipe(
        "The paper's comparison of priors: uniform.", replace(_CIFAR100, method=FeatureWGD(Uniform()))
    ),
    "cifar100-wrn16x2": NamedRecipe(
        "The paper's comparison of widths: WRN-16-2 × 10.", replace(_CIFAR100, model=WideResNetConfig(16, 2))
    ),
    "cifar100-wrn16x8": NamedRecipe(
        "The paper's comparison of widths: WRN-16-8 × 10.", replace(_CIFAR100, model=WideResNetConfig(16, 8))
    ),
    "cifar100-resnet32": NamedRecipe(
        "The paper's comparison with ADP and DICE: ResNet-32 × 4, Cauchy 1e-3, rank 4.",
        replace(_CIFAR100, model=CifarResNetConfig(32), members=4, method=FeatureWGD(Cauchy(1e-3), rank=4)),
    ),
    "cifar100-wrn28x2": NamedRecipe(
        "The paper's comparison with ADP and DICE: WRN-28-2 × 3, Cauchy 1e-3, rank 3.",
        replace(_CIFAR100, model=WideResNetConfig(28, 2), members=3, method=FeatureWGD(Cauchy(1e-3), rank=3)),
    ),
    "imagenet-resnet50": NamedRecipe(
        "The paper's ImageNet: ResNet-50 × 5, Cauchy 2e-3.",
        replace(_IMAGENET, epochs=90, batch=256, decay_epochs=(30, 60)),
    ),
}
"""Recipes by their command-line name."""
