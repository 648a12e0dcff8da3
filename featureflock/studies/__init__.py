"""The paper's tables and figures as studies, one file each: `featureflock reproduce NAME` trains and evaluates them.

A new file that adds its study to `STUDIES` is found without further changes.
"""

from featureflock.studies.runner import (
    Shard,
    StudyRun,
    StudyStatus,
    measure_study,
    run_study,
    study_results,
    study_runs,
    to_train,
)
from featureflock.studies.study import STUDIES, Row, Scale, Study
from featureflock.studies.tuning import Tuning, tune
from featureflock.utils.registry import import_submodules

import_submodules(__name__, __path__)

__all__ = [
    "STUDIES",
    "Row",
    "Scale",
    "Shard",
    "Study",
    "StudyRun",
    "StudyStatus",
    "Tuning",
    "measure_study",
    "run_study",
    "study_results",
    "study_runs",
    "to_train",
    "tune",
]
