"""Test pictures and what members make of them: those they disagree about, and where in them they look."""

import base64
import io
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from featureflock.evaluation import mutual_information
from featureflock.evaluation.evaluate_runs import Evaluation
from featureflock.evaluation.images import to_show
from featureflock.evaluation.predictions import read
from featureflock.report.rows import ReportRow

_PICTURES, _LARGE = 8, 224
"""How many are shown, and how large they are at most, in pixels."""


class MemberPrediction(NamedTuple):
    """What one member says of a picture."""

    name: str
    probability: str
    right: bool


class RowPredictions(NamedTuple):
    """What the members of a setting say of it."""

    title: str
    style: int
    members: list[MemberPrediction]
    right: int


@dataclass(frozen=True)
class DisputedImage:
    """A picture that members do not agree about."""

    position: int
    label: str
    information: str
    picture: str
    """As a data: URI; empty for inputs that are no pictures."""
    alt: str
    wide: int
    opinions: list[RowPredictions]


@dataclass(frozen=True)
class DisagreementPanel:
    pictures: list[DisputedImage]
    caption: str
    kind: str = "disputes"


def disputes(evaluation: Evaluation, settings: list[ReportRow], count: int = _PICTURES) -> DisagreementPanel | None:
    """The test pictures with the largest mutual information of prediction and member, mean over the settings."""
    clean = evaluation.conditions[0]
    several = [s for s in settings if s.members > 1]
    if not several:
        return None
    predictions = [read(s.runs[0], clean) for s in several]
    positions = _common([p.positions for p in predictions])
    parts = [p.at(positions) for p in predictions]
    score_b = torch.stack([mutual_information(p.log_probs.double().exp()) for p in parts]).mean(0)
    order = score_b.argsort(descending=True, stable=True)[:count]
    chosen = positions[order]
    pictures = pictures_of(evaluation, chosen)
    found = []
    for k, b in enumerate(order.tolist()):
        label = int(parts[0].labels[b])
        name, position = class_name(evaluation, label), int(positions[b])
        opinions = [_opinions(evaluation, s, p.log_probs[:, b], label) for s, p in zip(several, parts, strict=True)]
        uri = "" if pictures is None else data_uri(_shrunk(pictures[k]))
        wide = 0 if pictures is None else _display_width(pictures[k])
        alt = f"test picture {position}, {article(name)} {name}"
        found.append(DisputedImage(position, name, f"{score_b[b]:.3f}", uri, alt, wide, opinions))
    caption = (
        "The test examples with the largest mutual information between prediction and member, in nats: members are "
        "sure of different things. Mean over the first run of each setting with several members. For each member its "
        "most probable class, before calibration; ✓ where it is right."
    )
    return DisagreementPanel(found, caption)


def class_name(evaluation: Evaluation, label: int) -> str:
    names = evaluation.results["class_names"]
    return str(names[label]) if label < len(names) else f"class {label}"


def article(name: str) -> str:
    return "an" if name[:1].lower() in tuple("aeio8") else "a"


def data_uri(picture: Image.Image) -> str:
    held = io.BytesIO()
    picture.save(held, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


def _opinions(evaluation: Evaluation, s: ReportRow, log_p_nc: Tensor, label: int) -> RowPredictions:
    top, classes = log_p_nc.exp().max(-1)
    members = [
        MemberPrediction(class_name(evaluation, c), f"{100 * p:.0f}\u202f%", c == label)
        for p, c in zip(top.tolist(), classes.tolist(), strict=True)
    ]
    return RowPredictions(s.title, s.style, members, sum(m.right for m in members))


def _common(many: list[Tensor]) -> Tensor:
    """Positions that all have: an example that could not be read may be missing from some."""
    common = many[0]
    for other in many[1:]:
        common = common[torch.isin(common, other)]
    return common


def pictures_of(evaluation: Evaluation, positions: Tensor) -> NDArray[np.uint8] | None:
    """None for inputs that are no pictures."""
    try:
        return to_show(evaluation.splits.test.select(positions))
    except ValueError:
        return None


def _shrunk(picture: NDArray[np.uint8]) -> Image.Image:
    image = Image.fromarray(picture)
    image.thumbnail((_LARGE, _LARGE))
    return image


def _display_width(picture: NDArray[np.uint8]) -> int:
    """In CSS pixels: a whole multiple for small pictures, so that each of their pixels is a square."""
    high, wide = int(picture.shape[0]), int(picture.shape[1])
    return wide * max(1, 112 // max(high, wide)) if max(high, wide) <= 112 else round(112 * wide / max(high, wide))
