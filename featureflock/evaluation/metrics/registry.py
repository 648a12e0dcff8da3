"""The metric registry: summaries, tables, the page, `tune --by` and studies all read it.

    METRICS.add("top2", Metric("top2", "Top-2, %", "higher", "percent:2", lambda run: top2_accuracy(run.clean)))

A metric is computed for each run and averaged over seeds. One whose value does not exist for a run, such as a corrupted
metric without corrupted test sets, returns None.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from featureflock.utils.registry import Registry

Better = Literal["higher", "lower", ""]
Group = Literal["clean", "corrupted", "severity", "uncalibrated", "members", "views", "ood"]
MINUS = "−"


@dataclass(frozen=True)
class Metric:
    """One number per run, and how it is shown."""

    key: str
    """Name in summaries, `tune --by` and studies."""
    title: str
    """Column header."""
    better: Better
    """Which direction is better; empty if neither is."""
    format: str
    """Number of digits as "fixed:4", or of a percentage as "percent:2"."""
    compute: Callable[[Any], float | None]
    """From a run's measured predictions to the value; None where it does not apply."""
    meaning: str = ""
    """One phrase for the tooltip and the docs."""
    group: Group = "clean"
    """Which table it belongs to."""

    @property
    def percent(self) -> bool:
        return self.format.startswith("percent")

    @property
    def digits(self) -> int:
        return int(self.format.partition(":")[2])

    def text(self, value: float, sign: bool = False) -> str:
        """The value as it is printed, with a true minus sign and never −0.00."""
        scaled = 100 * value if self.percent else value
        text = f"{scaled:+.{self.digits}f}" if sign else f"{scaled:.{self.digits}f}"
        if float(text) == 0:
            text = text.lstrip("+-")
        return text.replace("-", MINUS)


METRICS: Registry[Metric] = Registry("metric")
