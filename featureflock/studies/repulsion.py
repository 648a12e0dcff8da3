"""feature-WGD with a tuned repulsion against Deep Ensembles (docs/notes/study_protocol.md).

Four settings with the endpoints of the protocol, and two curves: the endpoints against the strength τ of the repulsion,
and against the number of members. They are the same at the laptop and the paper scale.
"""

from dataclasses import replace
from typing import NamedTuple

from featureflock.core.priors import Cauchy, Normal
from featureflock.data import CIFAR100, FashionMNIST
from featureflock.evaluation import EvaluationProtocol
from featureflock.methods import (
    ADP,
    DICE,
    DeepEnsembles,
    FeatureMAP,
    FeatureWGD,
    FunctionWGD,
    Method,
    Single,
    WeightWGD,
)
from featureflock.models import FastCNNConfig, MLPConfig
from featureflock.studies.study import PAPER, STUDIES, Row, Study
from featureflock.training import RECIPES, Recipe


class TunedRepulsion(NamedTuple):
    """Precision and repulsion of feature-WGD."""

    precision: float
    repulsion: float

    @property
    def method(self) -> FeatureWGD:
        return FeatureWGD(Cauchy(self.precision), repulsion=self.repulsion)

    @property
    def without_repulsion(self) -> FeatureMAP:
        return FeatureMAP(Cauchy(self.precision))


TUNED_CIFAR10 = TunedRepulsion(3e-4, 10.0)
"""Chosen on held-out images (results/tuning_cifar10_repulsion.json)."""
TUNED_FASHION_MLP = TunedRepulsion(3e-4, 8.0)
"""Chosen on held-out images (results/tuning_fashion_mlp.json)."""
TUNED_CIFAR100 = TunedRepulsion(1e-4, 10.0)
"""Chosen on held-out images (results/tuning_cifar100.json)."""
TUNED_FASHION_CNN = TunedRepulsion(1e-3, 3.0)
"""Chosen on held-out images (results/tuning_fashion_cnn.json)."""
OTHERS_FASHION_MLP: tuple[Method, ...] = (
    replace(FunctionWGD(), prior=Cauchy(1e-7), rank=1, repulsion=3.0),
    replace(WeightWGD(), prior=Normal(1e-2), rank=5, repulsion=100.0),
    ADP(alpha=0.1, beta=0.05),
    DICE(delta=0.02, beta=100.0, ramp_epochs=1.0),
)
"""Chosen on held-out images (results/tuning_fashion_mlp.json)."""

_CIFAR10 = replace(RECIPES["cifar10-fast"].recipe, epochs=4, precision="bfloat16")
_CIFAR100 = replace(_CIFAR10, data=CIFAR100(padding=2), model=FastCNNConfig((32, 64, 256)))
_FASHION = Recipe(FashionMNIST(padding=0, flip=False), members=5, subset=5_000, precision="bfloat16")
# Learning rate and weight decay are the best for Deep Ensembles on held-out images.
_MLP = replace(_FASHION, model=MLPConfig((512, 512)), epochs=60, decay_epochs=(30, 45))
_MLP = replace(_MLP, learning_rate=0.0075, weight_decay=5e-5)
_CNN = replace(_FASHION, model=FastCNNConfig((16, 32, 128)), epochs=20, schedule="one-cycle")
_CNN = replace(_CNN, learning_rate=0.4, weight_decay=2e-3)

_TEST_SETS = EvaluationProtocol(corrupted_examples=1_000, ood=(), maps=500)
_COLUMNS = (*PAPER, "member_accuracy", "disagreement")
_MAPS = ("map_similarity", "corrupted_map_similarity")


def _unchanged(recipe: Recipe) -> Recipe:
    return recipe


def _rows(recipe: Recipe, paper_precision: float, tuned: TunedRepulsion, suffix: str = "") -> tuple[Row, ...]:
    """Deep Ensembles, feature-WGD as in the paper, feature-WGD tuned, and its precision without repulsion."""
    methods: dict[str, Method] = {
        "Deep Ensembles": DeepEnsembles(),
        "feature-WGD, paper": FeatureWGD(Cauchy(paper_precision), repulsion=1.0),
        f"feature-WGD, τ = {tuned.repulsion:g}": tuned.method,
        "feature-MAP": tuned.without_repulsion,
    }
    return tuple(Row(title + suffix, replace(recipe, method=method)) for title, method in methods.items())


def _fashion_rows(recipe: Recipe, tuned: TunedRepulsion, others: tuple[Method, ...] = ()) -> tuple[Row, ...]:
    """A single network, feature-WGD and its baselines with 5 and with 10 members, and the other methods with 5."""
    rows = [Row("Single", replace(recipe, method=Single(), members=1))]
    for members in (5, 10):
        rows += _rows(replace(recipe, members=members), 1e-3, tuned, f" × {members}")
    rows += [Row(f"{method.title} × 5", replace(recipe, method=method, members=5)) for method in others]
    return tuple(rows)


def _study(title: str, rows: tuple[Row, ...], columns: tuple[str, ...] = _COLUMNS, seeds: int = 5) -> Study:
    """The same at both scales; subsets differ between seeds where the recipes have one."""
    return Study(
        title,
        rows,
        columns,
        seeds=seeds,
        laptop_seeds=seeds,
        laptop=_unchanged,
        test_on=_TEST_SETS,
        new_subsets=rows[0].recipe.subset is not None,
    )


def _strength_rows() -> tuple[Row, ...]:
    """Deep Ensembles, then τ = 0 (feature-MAP) to 30, for each width and number of members."""
    rows = []
    for width in (128, 256, 512):
        for members in (5, 10):
            recipe = replace(_MLP, model=MLPConfig((width, width)), members=members)
            suffix = f", MLP {width}-{width} × {members}"
            rows.append(Row(f"Deep Ensembles{suffix}", replace(recipe, method=DeepEnsembles())))
            rows.append(Row(f"τ = 0{suffix}", replace(recipe, method=TUNED_FASHION_MLP.without_repulsion)))
            for repulsion in (1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0):
                method = replace(TUNED_FASHION_MLP.method, repulsion=repulsion)
                rows.append(Row(f"τ = {repulsion:g}{suffix}", replace(recipe, method=method)))
    return tuple(rows)


_SETTINGS = {
    "repulsion-cifar10": _study(
        "feature-WGD with tuned repulsion on CIFAR-10, fast CNN × 5",
        _rows(_CIFAR10, 1e-3, TUNED_CIFAR10),
        (*_COLUMNS, *_MAPS),
    ),
    "repulsion-cifar100": _study(
        "feature-WGD with tuned repulsion on CIFAR-100, fast CNN × 5",
        _rows(_CIFAR100, 5e-3, TUNED_CIFAR100),
        (*_COLUMNS, *_MAPS),
    ),
    "repulsion-fashion-mnist-mlp": _study(
        "feature-WGD with tuned repulsion on 5,000 images of Fashion-MNIST, MLP × 5 and × 10",
        _fashion_rows(_MLP, TUNED_FASHION_MLP, OTHERS_FASHION_MLP),
        seeds=10,
    ),
    "repulsion-fashion-mnist-cnn": _study(
        "feature-WGD with tuned repulsion on 5,000 images of Fashion-MNIST, CNN × 5 and × 10",
        _fashion_rows(_CNN, TUNED_FASHION_CNN),
        (*_COLUMNS, *_MAPS),
        seeds=10,
    ),
}
for _name, _setting in _SETTINGS.items():
    STUDIES.add(_name, replace(_setting, endpoints=PAPER))
STUDIES.add(
    "repulsion-strength",
    _study("Strength of the repulsion, 0 to 30, on 5,000 images of Fashion-MNIST", _strength_rows()),
)
STUDIES.add(
    "repulsion-size",
    _study(
        "Deep Ensembles and feature-WGD with tuned repulsion, 1 to 20 members, on 5,000 images of Fashion-MNIST",
        tuple(
            Row(f"{method.title} × {members}", replace(_MLP, method=method, members=members))
            for method in (DeepEnsembles(), TUNED_FASHION_MLP.method)
            for members in (1, 2, 3, 5, 10, 20)
        ),
    ),
)
