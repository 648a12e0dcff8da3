"""The metric registry: summaries, tables, the page, `tune --by` and studies all read it.

    def top2(run: RunPredictions) -> float:
        return hits(run.clean.log_probs, run.clean.labels, k=2)

    METRICS.add("top2", Metric("top2", "Top-2, %", "higher", "percent:2", top2))

A metric is computed for each run and averaged over seeds. It applies to the kinds of tasks in `tasks`, and `compute`
returns None where it does not apply for another reason.

A family is one entry for several numbers, such as the AUROC for each OOD set. Its key, title and meaning contain `{}`,
`parts` lists what goes there, and `compute` takes the part as its second argument:

    METRICS.add("auroc_{}", Metric("auroc_{}", "AUROC {}, %", "higher", "percent:1", auroc, parts=lambda run: run.ood))
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from featureflock.utils.registry import Registry

if TYPE_CHECKING:
    from featureflock.evaluation.run_predictions import RunPredictions

Better = Literal["higher", "lower", ""]
Group = Literal["clean", "human", "corrupted", "severity", "uncalibrated", "members", "views", "ood"]
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
    compute: Callable[..., float | None]
    """From a run's predictions to the value; None where it does not apply."""
    meaning: str = ""
    """One phrase for the tooltip and the docs."""
    group: Group = "clean"
    """Which table it belongs to."""
    parts: Callable[["RunPredictions"], Iterable[str]] | None = None
    """For a family: the values of `{}` in a run."""
    uncalibrated: str = ""
    """Key of the same metric before temperature scaling, to rely on where the temperature is at its bound."""
    tasks: tuple[str, ...] = ("classification",)
    """Kinds of tasks that it applies to: classification, multi-label, regression."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(fixed|percent):\d", self.format):
            raise ValueError(f'A format is like "fixed:4" or "percent:2"; the metric {self.key} has {self.format!r}.')
        if self.parts is not None and "{}" not in self.key:
            raise ValueError(f"The key of a metric with parts contains {{}} in place of the part; got {self.key!r}.")

    @property
    def percent(self) -> bool:
        return self.format.startswith("percent")

    def text(self, value: float, sign: bool = False) -> str:
        """The value as it is printed, with a true minus sign and never −0.00."""
        scaled, digits = 100 * value if self.percent else value, self.format.partition(":")[2]
        text = f"{scaled:+.{digits}f}" if sign else f"{scaled:.{digits}f}"
        if float(text) == 0:
            text = text.lstrip("+-")
        return text.replace("-", MINUS)

    def part(self, name: str) -> "Metric":
        """The member of a family for one part."""
        texts = {field: getattr(self, field).replace("{}", name) for field in ("key", "title", "meaning")}
        return replace(self, **texts, compute=lambda run: self.compute(run, name), parts=None)


METRICS: Registry[Metric] = Registry("metric")


def find_metric(key: str) -> Metric:
    """The metric with this key. A member of a family has its part in place of `{}`: `auroc_noise`."""
    families = [metric for metric in METRICS.values() if metric.parts is not None]
    if key not in METRICS or METRICS[key] in families:
        for family in sorted(families, key=lambda family: -len(family.key)):
            before, _, after = family.key.partition("{}")
            if match := re.fullmatch(f"{re.escape(before)}(.+){re.escape(after)}", key):
                return family.part(match[1])
    return METRICS[key]  # of an unknown metric: raises, with suggestions


def summarise(run: "RunPredictions") -> dict[str, float]:
    """The value of every metric that applies to a run, by key, in the order of the registry."""
    summary = {}
    for metric in METRICS.values():
        if run.task.kind not in metric.tasks:
            continue
        for one in [metric] if metric.parts is None else [metric.part(name) for name in metric.parts(run)]:
            if (value := one.compute(run)) is None:
                continue
            if not math.isfinite(value):
                raise ValueError(f"The metric {one.key} is {value}; return None where it does not apply.")
            summary[one.key] = float(value)
    return summary
