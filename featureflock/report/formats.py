"""Tables as Markdown, as LaTeX and for a terminal."""

import re

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from featureflock.evaluation.results import EvaluationResults
from featureflock.report.tables import ColumnHeader, Table, TableCell, comparison, differences
from featureflock.report.views import view_tables

_LATEX = {letter: rf"\{letter}" for letter in "{}$&#%_"} | {letter: f"${letter}$" for letter in "<>|"}
_LATEX |= {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}
_LATEX |= {"±": r"$\pm$", "−": "$-$", "–": "--", "×": r"$\times$", "’": "'", "…": r"\dots{}"}
_LATEX |= {"↑": r"$\uparrow$", "↓": r"$\downarrow$", "▲": r"$\blacktriangle$", "▼": r"$\blacktriangledown$"}


def main_tables(results: EvaluationResults) -> list[Table]:
    """The tables that are printed and written to files: comparison, differences vs Deep Ensembles, views."""
    return [table for table in (comparison(results), differences(results), *view_tables(results)) if table is not None]


def markdown(table: Table) -> str:
    """A Markdown table with the best values in bold and the note below."""
    headers = [_markdown_text(_header(header)) for header in table.headers]
    rules = ["---:" if header.numeric else "---" for header in table.headers]
    rows = [[_markdown_cell(cell) for cell in row] for row in table.rows]
    lines = ["| " + " | ".join(row) + " |" for row in (headers, rules, *rows)]
    return "\n".join([*lines, "", table.note, ""])


def latex(table: Table) -> str:
    """A LaTeX table with booktabs rules."""
    alignment = "".join("r" if header.numeric else "l" for header in table.headers)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_text(f'{table.title}. {table.note}')}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        " & ".join(latex_text(_header(header)) for header in table.headers) + r" \\",
        r"\midrule",
        *(" & ".join(map(_latex_cell, row)) + r" \\" for row in table.rows),
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
    title = f"{results.data}: {results.examples:,} test examples"
    tables = main_tables(results)
    return [_transposed(table, title if k == 0 else table.title) for k, table in enumerate(tables)]


def terminal_table(table: Table) -> RichTable:
    """One table for a terminal, one line per row."""
    shown = _empty(table.title, table.note)
    shown.show_edge = False
    for header in table.headers:
        shown.add_column(Text(_header(header)), justify="right" if header.numeric else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*map(_terminal_cell, row))
    return shown


def _transposed(table: Table, title: str) -> RichTable:
    shown = _empty(title, table.note)
    shown.add_column("")
    for row in table.rows:
        shown.add_column(Text(row[0].text), justify="right", overflow="fold")
    for k, header in enumerate(table.headers[1:], 1):
        shown.add_row(Text(_header(header)), *(_terminal_cell(row[k]) for row in table.rows))
    return shown


def _empty(title: str, note: str) -> RichTable:
    return RichTable(
        title=Text(title), caption=Text(note), box=box.SIMPLE_HEAD, caption_justify="left", title_justify="left"
    )


def _header(header: ColumnHeader) -> str:
    return f"{header.title} {header.arrow}".strip()


def _terminal_cell(cell: TableCell) -> Text:
    return Text(cell.plain, style="bold" if cell.best else "")


def _markdown_cell(cell: TableCell) -> str:
    text = _markdown_text(cell.plain)
    return f"**{text}**" if cell.best else text


def _markdown_text(text: str) -> str:
    text = re.sub(r"([\\|*_`~]|(?<=\])[(:])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _latex_cell(cell: TableCell) -> str:
    text = latex_text(cell.plain)
    return rf"\textbf{{{text}}}" if cell.best else text
