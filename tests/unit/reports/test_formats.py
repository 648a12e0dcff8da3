"""Tables as Markdown, as LaTeX and for a terminal."""

import io
import re

from helpers.result_groups import THREE, group, results_of
from rich.console import Console

from featureflock.reports.formats import latex, markdown, terminal_tables
from featureflock.reports.tables import comparison


def test_markdown_rows_have_the_same_number_of_cells():
    table = comparison(results_of(group("a|b*c [x](y)", {"nll": (0.3, 0.1)}), group("<i>", {"nll": (0.4, 0.1)})))
    lines = markdown(table).splitlines()[:4]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {5}
    assert r"| a\|b\*c [x]\(y) | 5 | 3 | **0.3000 ± 0.1000** |" in lines
    assert "&lt;i>" in lines[3]


def test_latex_is_escaped_and_rows_have_as_many_cells_as_columns():
    hostile = r"50% of_$x^2$ & {#1} ~\end{table}"
    text = latex(comparison(results_of(group(hostile, {"nll": (0.3, 0.1)}), group("B", {"nll": 0.2}))))
    assert (
        r"50\% of\_\$x\textasciicircum{}2\$ \& \{\#1\} \textasciitilde{}\textbackslash{}end\{table\} "
        r"& 5 & 3 & 0.3000 $\pm$ 0.1000 \\"
    ) in text
    assert r"B & 5 & 3 & \textbf{0.2000} \\" in text
    assert text.count(r"\end{table}") == 1
    (alignment,) = re.findall(r"\\begin{tabular}{(\w+)}", text)
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(alignment)} == {4}
    assert not re.search(r"[^\x00-\x7f]", text)


def printed(table):
    console = Console(width=100, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(table)
    return console.file.getvalue()


def test_a_terminal_shows_titles_without_markup_and_best_values_in_bold():
    (table,) = terminal_tables(results_of(group("[red]x[/red]", {"nll": (0.3, 0.1)}), group("y", {"nll": 0.4})))
    text = printed(table)
    assert "[red]x[/red]" in text
    assert re.search(r"\x1b\[1m[^\x1b]*0\.3000 ±0\.1000", text)
    assert not re.search(r"\x1b\[1m[^\x1b]*0\.4000", text)


def test_a_terminal_shows_differences_above_their_intervals_if_there_are_any():
    text = printed(terminal_tables(THREE)[1])
    assert re.search(r"−0\.0100 ▲.*\n.*\[−0\.0200, −0\.0001\]", text)
