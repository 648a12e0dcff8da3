"""Tables and figures of the paper as studies, each trained, measured and set beside it by `featureflock reproduce`."""

from featureflock.studies import (
    adp_dice,
    cam_figure,
    cam_similarity,
    cifar10,
    cifar100,
    dominoes,
    ensemble_size,
    feature_map,
    imagenet,
    longer_training,
    priors,
    rank,
    severity,
    text_vs_code,
    two_views,
    width,
)
from featureflock.studies.run_study import Shard, StudyRun, StudyStatus, reproduce, study_runs, to_train
from featureflock.studies.study import Row, Scale, Study

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
    "cam-figure": cam_figure.STUDY,
    "severity": severity.STUDY,
    "text-vs-code": text_vs_code.STUDY,
    "longer-training": longer_training.STUDY,
    "two-views": two_views.STUDY,
    "dominoes": dominoes.STUDY,
}
"""By the names that the command line knows them by."""

__all__ = [
    "STUDIES",
    "Row",
    "Scale",
    "Shard",
    "Study",
    "StudyRun",
    "StudyStatus",
    "reproduce",
    "study_runs",
    "to_train",
]
