"""Evaluation results with given means and differences only, for tests of tables and sentences."""

from featureflock.evaluation.results import EvaluationResults, GroupResult
from featureflock.evaluation.statistics import PairedDifference, SeedMean

BASELINE = "Deep Ensembles"


def group(title, metrics, *, seeds=3, members=5, **more):
    """`metrics` holds means, or pairs of mean and standard deviation."""
    pairs = {key: value if isinstance(value, tuple) else (value, None) for key, value in metrics.items()}
    means = {key: SeedMean(mean, sd, seeds) for key, (mean, sd) in pairs.items()}
    return GroupResult(title, title, members, [], list(range(seeds)), means, **more)


def compared(title, metrics, differences, *, seeds=3, **more):
    """A group with differences vs Deep Ensembles: (mean, low, high), over this number of shared seeds."""
    found = {key: PairedDifference(*difference, seeds) for key, difference in differences.items()}
    return group(title, metrics, seeds=seeds, baseline=BASELINE, differences=found, **more)


def results_of(*groups):
    return EvaluationResults("Digits", 10, [], 597, 597, [], [], [], list(groups), {})


THREE = results_of(
    group(BASELINE, {"accuracy": (0.90122, 0.002), "nll": (0.31, 0.01)}, deep_ensemble_equivalent=5.0),
    compared(
        "A & B_1",
        {"accuracy": (0.90124, 0.0015), "nll": (0.29996, 0.02)},
        {"accuracy": (0.00004, -0.01, 0.01), "nll": (-0.01004, -0.02, -0.0001)},
        deep_ensemble_equivalent="more than 5",
    ),
    compared(
        "C",
        {"accuracy": (0.85, 0.001), "nll": (0.3, 0.0)},
        {"accuracy": (-0.0512, -0.06, -0.04), "nll": (-0.01, -0.03, 0.01)},
        deep_ensemble_equivalent=1.0,
    ),
)
