"""The paper's tables as studies, each trained, measured and set beside the paper by `featureflock reproduce`."""

from featureflock.recipes.ablations import FEATURE_MAP, PRIORS, RANK, WIDTH
from featureflock.recipes.cifar import CIFAR10, CIFAR100
from featureflock.recipes.dominoes import DOMINOES
from featureflock.recipes.others import ADP_DICE, IMAGENET
from featureflock.recipes.reproducing import Cell, Outcome, Shard, cells, reproduce
from featureflock.recipes.study import Row, Scale, Study
from featureflock.recipes.two_views import TWO_VIEWS

STUDIES: dict[str, Study] = {
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
    "imagenet": IMAGENET,
    "adp-dice": ADP_DICE,
    "priors": PRIORS,
    "feature-map": FEATURE_MAP,
    "width": WIDTH,
    "rank": RANK,
    "two-views": TWO_VIEWS,
    "dominoes": DOMINOES,
}
"""By the names that the command line knows them by."""

__all__ = ["STUDIES", "Cell", "Outcome", "Row", "Scale", "Shard", "Study", "cells", "reproduce"]
