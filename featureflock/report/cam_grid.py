"""Where members look: their class activation maps over a few test pictures."""

from dataclasses import dataclass

import torch
from torch import Tensor

from featureflock.evaluation.cam_figure import cam_grid
from featureflock.evaluation.evaluate_runs import Evaluation
from featureflock.report.disagreement import article, class_name, data_uri, pictures_of
from featureflock.report.rows import ReportRow, baseline_of
from featureflock.report.tables import in_words

_PICTURES, _SETTINGS, _MEMBERS, _CELL = 6, 4, 5, 72


@dataclass(frozen=True)
class Grid:
    picture: str
    """As a data: URI."""
    alt: str
    caption: str
    wide: int
    kind: str = "grid"


def map_grid(evaluation: Evaluation, settings: list[ReportRow]) -> Grid | None:
    """Deep Ensembles above, others below; None where no maps were computed."""
    baseline = baseline_of(settings)
    order = sorted((s for s in settings if s.members > 1), key=lambda s: s is not baseline)
    kept = [(s, found) for s in order if (found := evaluation.maps(s.runs[0])) is not None][:_SETTINGS]
    if not kept:
        return None
    positions = kept[0][1].positions
    kept = [(s, found) for s, found in kept if torch.equal(found.positions, positions)]
    labels = evaluation.splits.test.labels[positions]
    places = _one_of_each_class(labels)
    pictures = pictures_of(evaluation, positions[places])
    if pictures is None:
        return None
    groups = [(f"{s.title}, seed {s.measured[0]['seed']}", found.maps[:_MEMBERS, places]) for s, found in kept]
    image = cam_grid(pictures, groups, cell=_CELL)
    names = [class_name(evaluation, label) for label in labels[places].tolist()]
    whose = in_words(title for title, _ in groups)
    what = in_words(f"{article(name)} {name}" for name in names)
    some = f" The first {_MEMBERS} members are shown." if any(s.members > _MEMBERS for s, _ in kept) else ""
    caption = (
        "Beside each test picture, where each member looks: Grad-CAM for the class that the ensemble predicts, bright "
        f"where the picture speaks for it. One picture of each of the first classes, not chosen by their looks.{some}"
    )
    alt = f"Class activation maps of {whose}, over pictures of {what}."
    return Grid(data_uri(image.quantize(256)), alt, caption, image.width)


def _one_of_each_class(labels: Tensor) -> Tensor:
    """Positions of the first example of each class, of as many as are shown; then those that come next."""
    first = {int(label): place for place, label in reversed(list(enumerate(labels.tolist())))}
    chosen = [first[label] for label in sorted(first)][:_PICTURES]
    rest = [place for place in range(len(labels)) if place not in chosen]
    return torch.tensor([*chosen, *rest[: _PICTURES - len(chosen)]])
