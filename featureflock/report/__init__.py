"""What an evaluation says, for readers: a page, tables for a paper and for a terminal, and all numbers as JSON."""

from featureflock.report.formats import markdown, terminal_table, terminal_tables, terminal_wide
from featureflock.report.paper_comparison import beside_paper
from featureflock.report.write import write_report, write_tables

__all__ = [
    "beside_paper",
    "markdown",
    "terminal_table",
    "terminal_tables",
    "terminal_wide",
    "write_report",
    "write_tables",
]
