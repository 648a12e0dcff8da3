"""What an evaluation says, for readers: a page, tables for a paper and for a terminal, and all numbers as JSON."""

from featureflock.report.formats import terminal_table, terminal_tables
from featureflock.report.writing import write_report, write_tables

__all__ = ["terminal_table", "terminal_tables", "write_report", "write_tables"]
