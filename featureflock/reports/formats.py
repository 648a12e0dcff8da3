"""Tables as Markdown, as LaTeX and for a terminal."""

import re
from collections.abc import Callable
from dataclasses import replace

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from featureflock.evaluation.results import EvaluationResults
from featureflock.reports.tables import SYMBOLS, Table, TableCell, comparison, differences
from featureflock.reports.views import view_tables

_LATEX = {letter: rf"\{letter}" for letter in "{}$&#%_"} | {letter: f"${letter}$" for letter in "<>|"}
_LATEX |= {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}
_LATEX |= {"ρ": r"$\rho$", "τ": r"$\tau$"}
_LATEX |= {"±": r"$\pm$", "−": "$-$", "–": "--", "×": r"$\times$", "’": "'", "…": r"\dots{}"}
_LATEX |= {"↑": r"$\uparrow$", "↓": r"$\downarrow$", "▲": r"$\blacktriangle$", "▼": r"$\blacktriangledown$"}


def main_tables(results: EvaluationResults) -> list[Table]:
    """The tables that are printed and written to files: comparison, differences vs Deep Ensembles, views."""
    return [table for table in (comparison(results), differences(results), *view_tables(results)) if table is not None]


def markdown(table: Table) -> str:
    """A Markdown table with the best values in bold and the note below."""
    rules = ["---:" if header.numeric else "---" for header in table.headers]
    first, *rows = _written(table, _markdown_text, "**{}**")
    lines = ["| " + " | ".join(row) + " |" for row in (first, rules, *rows)]
    return "\n".join([*lines, "", table.note, ""])


def latex(table: Table) -> str:
    """A LaTeX table with booktabs rules."""
    alignment = "".join("r" if header.numeric else "l" for header in table.headers)
    first, *rows = (" & ".join(row) + r" \\" for row in _written(table, latex_text, r"\textbf{{{}}}"))
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_text(f'{table.title}. {table.note}')}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        first,
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
        "",
    ]
    return "\n".join(lines)


def latex_text(text: str) -> str:
    """Text with everything escaped that is special in LaTeX."""
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))


def terminal_tables(results: EvaluationResults) -> list[RichTable]:
    """The main tables for a terminal, one column per row of the table, so that a few methods fit side by side."""
    first, *others = main_tables(results)
    tables = [replace(first, title=f"{results.data}: {results.examples:,} test examples"), *others]
    return [terminal_table(table, transposed=True) for table in tables]


def terminal_table(table: Table, transposed: bool = False) -> RichTable:
    """One table for a terminal, one line per row, or one column per row if transposed."""
    shown = RichTable(title=Text(table.title), caption=Text(f"{table.note}\n"), box=box.SIMPLE_HEAD, show_edge=False)
    shown.pad_edge, shown.collapse_padding = False, True
    shown.title_justify = shown.caption_justify = "left"
    numeric = [header.numeric for header in table.headers]
    grid = [[Text(text) for text in table.header_texts]]
    grid += [[_terminal_cell(cell) for cell in row] for row in table.rows]
    if transposed:
        grid, numeric = [list(column) for column in zip(*grid, strict=True)], [False, *[True] * len(table.rows)]
        grid[0][0] = Text()
    for title, right in zip(grid[0], numeric, strict=True):
        shown.add_column(title, justify="right" if right else "left", overflow="fold")
    for line in grid[1:]:
        shown.add_row(*line)
    shown.columns[0].no_wrap, shown.columns[0].overflow = transposed, "ellipsis" if transposed else "fold"
    return shown


def _terminal_cell(cell: TableCell) -> Text:
    """Number, deviation and significance, then interval and p-value on lines of their own: never broken after a ±."""
    number = (cell.text, f"±{cell.spread}" if cell.spread else "", SYMBOLS[cell.significance])
    lines = (" ".join(filter(None, number)), cell.detail, cell.p_value)
    return Text("\n".join(filter(None, lines)), style="bold" if cell.best else "")


def _written(table: Table, escape: Callable[[str], str], bold: str) -> list[list[str]]:
    """Headers and rows, escaped, with the best values in bold."""
    rows = [[bold.format(escape(c.plain)) if c.best else escape(c.plain) for c in row] for row in table.rows]
    return [[escape(text) for text in table.header_texts], *rows]


def _markdown_text(text: str) -> str:
    text = re.sub(r"([\\|*_`~]|(?<=\])[(:])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;")
