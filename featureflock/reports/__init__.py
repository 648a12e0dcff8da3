"""Reports of evaluation results: tables as Markdown, LaTeX and for a terminal, figures, and one HTML page."""

from featureflock.reports.any_ensemble import report
from featureflock.reports.formats import markdown, terminal_table, terminal_tables
from featureflock.reports.write import read_report, write_report, write_tables

__all__ = ["markdown", "read_report", "report", "terminal_table", "terminal_tables", "write_report", "write_tables"]
