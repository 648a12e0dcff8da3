"""A table in Markdown, in LaTeX and for a terminal."""

import re
from typing import Any

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from featureflock.report.tables import ColumnHeader, Table, TableCell, comparison, differences
from featureflock.report.views import view_tables

_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    "×": r"$\times$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "▲": r"$\blacktriangle$",
    "▼": r"$\blacktriangledown$",
    "’": "'",
    "…": r"\dots{}",
}


def markdown(table: Table) -> str:
    """With the best in bold and what the numbers are below."""
    heads = [_markdown_text(_titled(head)) for head in table.heads]
    rules = ["---:" if head.numeric else "---" for head in table.heads]
    rows = [[_markdown_cell(cell) for cell in row] for row in table.rows]
    lines = ["| " + " | ".join(row) + " |" for row in (heads, rules, *rows)]
    return "\n".join([*lines, "", table.note, ""])


def latex(table: Table, label: str) -> str:
    """For a paper, with the rules of booktabs."""
    shape = "".join("r" if head.numeric else "l" for head in table.heads)
    rows = [" & ".join(map(_latex_cell, row)) + r" \\" for row in table.rows]
    heads = " & ".join(latex_text(_titled(head)) for head in table.heads) + r" \\"
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{latex_text(f'{table.title}. {table.note}')}}}",
            rf"\label{{{label}}}",
            rf"\begin{{tabular}}{{{shape}}}",
            r"\toprule",
            heads,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def latex_text(text: str) -> str:
    """Any text, so that LaTeX sets it as it is."""
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))


def terminal_table(results: dict[str, Any]) -> RichTable:
    """The comparison, for printing."""
    return _upright(comparison(results), f"{results['data']}: {results['examples']:,} test examples")


def terminal_tables(results: dict[str, Any]) -> list[RichTable]:
    """The comparison, and the differences from Deep Ensembles and what is known of views, if any, for printing."""
    others = [table for table in (differences(results), *view_tables(results)) if table is not None]
    return [terminal_table(results), *(_upright(table, table.title) for table in others)]


def terminal_wide(table: Table) -> RichTable:
    """A line for each row, for printing."""
    shown = RichTable(box=box.SIMPLE_HEAD, show_edge=False, caption_justify="left", title_justify="left")
    shown.title, shown.caption = Text(table.title), Text(table.note)
    for head in table.heads:
        shown.add_column(Text(_titled(head)), justify="right" if head.numeric else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(cell.plain, style="bold" if cell.best else "") for cell in row))
    return shown


def _upright(table: Table, title: str) -> RichTable:
    """With a column for each setting, so that a few of them fit beside each other."""
    shown = RichTable(box=box.SIMPLE_HEAD, caption_justify="left", title_justify="left")
    shown.title, shown.caption = Text(title), Text(table.note)
    shown.add_column("")
    for row in table.rows:
        shown.add_column(Text(row[0].text), justify="right", overflow="fold")
    for place, head in enumerate(table.heads[1:], 1):
        cells = [Text(row[place].plain, style="bold" if row[place].best else "", justify="right") for row in table.rows]
        shown.add_row(Text(_titled(head)), *cells)
    return shown


def _titled(head: ColumnHeader) -> str:
    return f"{head.title} {head.arrow}".strip()


def _markdown_cell(cell: TableCell) -> str:
    text = _markdown_text(cell.plain)
    return f"**{text}**" if cell.best else text


def _markdown_text(text: str) -> str:
    text = re.sub(r"([\\|*_`~]|(?<=\])[(:])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _latex_cell(cell: TableCell) -> str:
    text = latex_text(cell.plain)
    return rf"\textbf{{{text}}}" if cell.best else text
