"""A study's numbers, the paper's below them, and the differences from Deep Ensembles."""

from collections.abc import Iterable
from typing import Any

from featureflock.report.tables import (
    BY_SEVERITY,
    CLEAN,
    CORRUPTED,
    MEMBERS,
    UNCALIBRATED,
    Column,
    ColumnHeader,
    Table,
    TableCell,
    difference_cell,
    head_of,
    mean_cells,
    with_best,
)

_COLUMNS = {column.key: column for column in (*CLEAN, *CORRUPTED, *BY_SEVERITY, *UNCALIBRATED, *MEMBERS)}


def beside_paper(results: dict[str, Any]) -> Table:
    """What `reproduce` gives as a table."""
    rows = results["rows"]
    columns = columns_of(dict.fromkeys(key for row in rows for key in row["ours"]))
    heads = [ColumnHeader("", numeric=False), ColumnHeader("Members"), *map(head_of, columns)]
    ours = [
        [TableCell(row["title"]), TableCell(str(row["members"])), *mean_cells({"metrics": row["ours"]}, columns)]
        for row in rows
    ]
    lines: list[tuple[TableCell, ...]] = []
    for row, own in zip(rows, with_best(heads, ours), strict=True):
        lines.append(own)
        if row.get("differences"):
            found = [difference_cell(column, row["differences"].get(column.key)) for column in columns]
            lines.append((TableCell(f"less {row['against']}"), TableCell(""), *found))
        if row["paper"]:
            lines.append(
                (
                    TableCell("paper"),
                    TableCell(""),
                    *(TableCell(row["paper"].get(column.key, "")) for column in columns),
                )
            )
    seeds = max(found["seeds"] for row in rows for found in row["ours"].values())
    is_corrupted = any(column in (*CORRUPTED, *BY_SEVERITY) for column in columns)
    of_each = results["corrupted_examples"]
    few = f" and on {of_each:,} of each corrupted test set" if of_each and is_corrupted else ""
    scale = (
        f"Ours at the {results['scale']} scale, the paper's at its own. " if any(row["paper"] for row in rows) else ""
    )
    note = (
        f"{scale}Mean ± standard deviation over {seeds} seed{'s' * (seeds > 1)}, on {results['test_examples']:,} test "
        f"examples{few}. Differences are paired by seed, with their 95 % confidence interval; ▲ better, ▼ worse beyond "
        "noise. The best of ours are bold."
    )
    return Table("beside-paper", results["what"], tuple(heads), tuple(lines), note)


def columns_of(keys: Iterable[str]) -> list[Column]:
    """How numbers of a summary are shown; those that the tables do not know, by their names."""
    return [_COLUMNS.get(key) or Column(key, key.replace("_", " "), 3, "", "") for key in keys]
