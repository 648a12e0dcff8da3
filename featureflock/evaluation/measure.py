"""Everything that is measured for one run, from its predictions alone."""

from featureflock.evaluation.metrics.registry import summarise
from featureflock.evaluation.results import RunResult
from featureflock.evaluation.run_predictions import RunPredictions


def measure(predictions: RunPredictions, name: str, method: str, seed: int) -> RunResult:
    """All metrics of a run. `name` identifies it in the results."""
    return RunResult(
        name=name,
        method=method,
        seed=seed,
        members=len(predictions.clean.log_probs),
        clean=predictions.clean.scores,
        details=predictions.details,
        summary=summarise(predictions),
        views=predictions.view_results,
        corrupted=predictions.corrupted_scores,
        corrupted_mean=predictions.corrupted_mean,
        ood=predictions.ood_detection,
        maps=predictions.map_similarity,
    )
