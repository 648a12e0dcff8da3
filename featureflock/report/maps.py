"""Where members look: their class activation maps over a few test pictures."""

from dataclasses import dataclass

from featureflock.evaluation.evaluating import Evaluation
from featureflock.report.settings import Shown


@dataclass(frozen=True)
class Grid:
    picture: str
    """As a data: URI."""
    alt: str
    caption: str
    wide: int
    kind: str = "grid"


def map_grid(evaluation: Evaluation, settings: list[Shown]) -> Grid | None:
    """Deep Ensembles above, others below; None where no maps were computed."""
    return None
