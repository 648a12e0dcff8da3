"""Tables of a search for hyper-parameters: its candidates, and the best settings of several methods."""

from collections.abc import Sequence

from featureflock.evaluation.metrics.registry import Metric, find_metric
from featureflock.evaluation.statistics import paired_differences
from featureflock.reports.tables import (
    MISSING,
    SIGNIFICANCE_NOTE,
    ColumnHeader,
    Table,
    TableCell,
    difference_cell,
    mark_best,
    mean_cells,
    metric_header,
)
from featureflock.studies.tuning import Candidate, Tuning


def tuning_table(tuning: Tuning) -> Table:
    """The candidates of one method, the best first."""
    metrics = _metrics([tuning])
    names = [field.split(".")[-1].replace("_", " ") for field in tuning.space]
    headers = [*(ColumnHeader(name) for name in names), ColumnHeader("Seeds"), *map(metric_header, metrics)]
    rows = [_row(candidate, metrics) for candidate in tuning.candidates]
    note = (
        "Mean ± standard deviation over seeds, on held-out examples. The first row is the best; candidates with fewer "
        "seeds were eliminated earlier."
    )
    if any(candidate.diverged for candidate in tuning.candidates):
        note += " –: training diverged."
    return Table("tuning", f"{tuning.best.method.title}: candidates", headers, rows, note)


def best_settings(tunings: Sequence[Tuning], baseline: str) -> Table:
    """The best setting of each method, and its difference vs the baseline's, paired by seed."""
    metrics = _metrics(tunings)
    headers = [ColumnHeader("Method", numeric=False), ColumnHeader("Settings", numeric=False)]
    headers += [ColumnHeader("Seeds"), *map(metric_header, metrics)]
    best = {tuning.best.method.title: tuning.candidates[0] for tuning in tunings}
    means = [
        [TableCell(title), TableCell(candidate.title), *_row(candidate, metrics)[len(candidate.values) :]]
        for title, candidate in best.items()
    ]
    theirs = _summaries(best[baseline]) if baseline in best else {}
    rows: list[list[TableCell]] = []
    for row, (title, candidate) in zip(mark_best(headers, means), best.items(), strict=True):
        rows.append(row)
        differences = paired_differences(_summaries(candidate), theirs) if theirs and title != baseline else {}
        if differences:
            cells = [difference_cell(metric, differences.get(metric.key)) for metric in metrics]
            rows.append([TableCell(f"difference vs {baseline}"), TableCell(""), TableCell(""), *cells])
    note = "Mean ± standard deviation over seeds, on held-out examples, each method tuned with the same budget."
    note += f" Differences are paired by seed. {SIGNIFICANCE_NOTE}" if theirs and len(best) > 1 else ""
    note += " The settings were chosen on these examples, so the values are optimistic."
    return Table("best-settings", "Best settings on held-out examples", headers, rows, note)


def _metrics(tunings: Sequence[Tuning]) -> list[Metric]:
    found = [key for tuning in tunings for result in tuning.candidates[0].results.values() for key in result.summary]
    clean = [key for key in found if find_metric(key).group == "clean"]
    members = ["member_accuracy", "disagreement", "epistemic_share"]
    keys = [*(tuning.metric.key for tuning in tunings), *clean, *members]
    return [find_metric(key) for key in dict.fromkeys(keys) if key in found]


def _row(candidate: Candidate, metrics: Sequence[Metric]) -> list[TableCell]:
    values = [TableCell(f"{v:.15g}" if isinstance(v, float) else str(v)) for v in candidate.values.values()]
    seeds = TableCell(str(len(candidate.results)), value=len(candidate.results))
    if candidate.diverged:
        return [*values, seeds, *(MISSING for _ in metrics)]
    result = next(iter(candidate.results.values()))
    means = {metric.key: candidate.mean(metric.key) for metric in metrics if metric.key in result.summary}
    return [*values, seeds, *mean_cells(means, metrics)]


def _summaries(candidate: Candidate) -> dict[int, dict[str, float]]:
    return {seed: result.summary for seed, result in candidate.results.items()}
