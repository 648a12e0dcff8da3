"""A study's results beside the paper's numbers, with differences vs Deep Ensembles."""

from typing import Any

from featureflock.evaluation.statistics import PairedDifference, SeedMean
from featureflock.report.tables import (
    SIGNIFICANCE_NOTE,
    ColumnHeader,
    Table,
    TableCell,
    difference_cell,
    header_for,
    mark_best,
    mean_cells,
    metric_for,
    plural,
)


def beside_paper(results: dict[str, Any]) -> Table:
    """The results of `reproduce` as a table."""
    rows = results["rows"]
    metrics = [metric_for(key) for key in dict.fromkeys(key for row in rows for key in row["ours"])]
    headers = [ColumnHeader("", numeric=False), ColumnHeader("Members"), *map(header_for, metrics)]
    ours = []
    for row in rows:
        means = {key: SeedMean(**value) for key, value in row["ours"].items()}
        ours.append([TableCell(row["title"]), TableCell(str(row["members"])), *mean_cells(means, metrics)])
    lines: list[tuple[TableCell, ...]] = []
    for row, own in zip(rows, mark_best(headers, ours), strict=True):
        lines.append(own)
        if found := {key: PairedDifference(**value) for key, value in (row.get("differences") or {}).items()}:
            cells = [difference_cell(metric, found.get(metric.key)) for metric in metrics]
            lines.append((TableCell(f"difference vs {row['against']}"), TableCell(""), *cells))
        if row["paper"]:
            cells = [TableCell(row["paper"].get(metric.key, "")) for metric in metrics]
            lines.append((TableCell("paper"), TableCell(""), *cells))
    seeds = max(value["seeds"] for row in rows for value in row["ours"].values())
    corrupted = results["corrupted_examples"] and any(metric.group in ("corrupted", "severity") for metric in metrics)
    fewer = f" and {results['corrupted_examples']:,} of each corrupted test set" if corrupted else ""
    scale = f"Ours at the {results['scale']} scale, the paper's at its own. " if any(r["paper"] for r in rows) else ""
    note = (
        f"{scale}Mean ± standard deviation over {plural(seeds, 'seed')}, on {results['test_examples']:,} test examples"
        f"{fewer}. Our best values in bold. Differences are paired by seed. {SIGNIFICANCE_NOTE}"
    )
    return Table("beside-paper", results["what"], tuple(headers), tuple(lines), note)
