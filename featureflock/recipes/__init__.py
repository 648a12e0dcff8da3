"""Tables and figures of the paper as studies, each trained, measured and set beside it by `featureflock reproduce`."""

from featureflock.recipes import (
    adp_dice,
    cam_picture,
    cam_similarity,
    cifar10,
    cifar100,
    dominoes,
    ensemble_size,
    feature_map,
    imagenet,
    longer,
    priors,
    rank,
    severity,
    text_or_code,
    two_views,
    width,
)
from featureflock.recipes.reproducing import Cell, Outcome, Shard, cells, reproduce, to_train
from featureflock.recipes.study import Row, Scale, Study

STUDIES: dict[str, Study] = {
    "cifar10": cifar10.STUDY,
    "cifar100": cifar100.STUDY,
    "imagenet": imagenet.STUDY,
    "adp-dice": adp_dice.STUDY,
    "priors": priors.STUDY,
    "feature-map": feature_map.STUDY,
    "width": width.STUDY,
    "rank": rank.STUDY,
    "ensemble-size": ensemble_size.STUDY,
    "cam-similarity": cam_similarity.STUDY,
    "cam-picture": cam_picture.STUDY,
    "severity": severity.STUDY,
    "text-or-code": text_or_code.STUDY,
    "longer": longer.STUDY,
    "two-views": two_views.STUDY,
    "dominoes": dominoes.STUDY,
}
"""By the names that the command line knows them by."""

__all__ = ["STUDIES", "Cell", "Outcome", "Row", "Scale", "Shard", "Study", "cells", "reproduce", "to_train"]
