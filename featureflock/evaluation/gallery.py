"""Images for the report: test examples that members disagree about, and class activation maps on a few images.

Shapes: n members, B examples, h × w pixels of a map.
"""

import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from featureflock.data import Examples
from featureflock.evaluation.cam_cache import CachedMaps
from featureflock.evaluation.cam_figure import cam_grid
from featureflock.evaluation.diversity import mutual_information
from featureflock.evaluation.images import displayable
from featureflock.evaluation.predictions import Predictions
from featureflock.evaluation.results import CamFigure, DisputedExample

DISPUTED, MAX_SIZE = 8, 224
"""Number of disputed examples, and the largest side of their images in pixels."""
CAM_IMAGES, CAM_GROUPS, CAM_MEMBERS, CAM_CELL = 6, 4, 5, 72
CAM_FILE = "class-activation-maps.png"

Images = dict[str, bytes]
"""PNG files by name."""


class MemberVotes(NamedTuple):
    """What each member predicts for B examples, without the rest of its probabilities."""

    positions: Tensor
    labels: Tensor
    classes: Tensor
    """Most probable class of each member, (n, B)."""
    probs: Tensor
    """Its probability, (n, B)."""
    mutual_information: Tensor
    """Between prediction and member, (B,)."""

    @classmethod
    def of(cls, predictions: Predictions) -> "MemberVotes":
        probs = predictions.log_probs.double().exp()
        top, classes = probs.max(-1)
        return cls(predictions.positions, predictions.labels, classes, top, mutual_information(probs))


def disputed_examples(
    votes: Mapping[str, MemberVotes], test: Examples | None, count: int = DISPUTED
) -> tuple[list[DisputedExample], Images]:
    """The examples of `test` with the largest mutual information between prediction and member, mean over groups.

    `votes` are by group title, of groups with several members. There are no images if `test` is None.
    """
    if not votes:
        return [], {}
    positions, *others = (each.positions for each in votes.values())
    for other in others:  # an unreadable example may be missing from some
        positions = positions[torch.isin(positions, other)]
    masks = {title: torch.isin(each.positions, positions) for title, each in votes.items()}
    parts = {title: MemberVotes(*(part[..., masks[title]] for part in each)) for title, each in votes.items()}
    information_b = torch.stack([part.mutual_information for part in parts.values()]).mean(0)
    order = information_b.argsort(descending=True, stable=True)[:count]
    pixels = None if test is None else _pixels(test, positions[order])
    labels, examples, images = next(iter(parts.values())).labels, [], {}
    for k, b in enumerate(order.tolist()):
        position, name = int(positions[b]), None
        if pixels is not None:
            name = f"disputed-{position}.png"
            image = Image.fromarray(pixels[k])
            image.thumbnail((MAX_SIZE, MAX_SIZE))
            images[name] = _png(image)
        tops = {title: (part.classes[:, b].tolist(), part.probs[:, b].tolist()) for title, part in parts.items()}
        predictions = {title: list(zip(*pair, strict=True)) for title, pair in tops.items()}
        examples.append(DisputedExample(position, int(labels[b]), float(information_b[b]), name, predictions))
    return examples, images


def draw_cam_figure(maps: Sequence[tuple[str, int, CachedMaps]], test: Examples) -> tuple[CamFigure | None, Images]:
    """Class activation maps of the first groups, over one image of each of the first classes of `test`.

    `maps` are title, seed and maps of each group.
    """
    if not maps:
        return None, {}
    positions = maps[0][2].positions
    shown = [each for each in maps[:CAM_GROUPS] if torch.equal(each[2].positions, positions)]
    labels = test.labels[positions]
    # The first image of each class, then the next images.
    first = {int(label): place for place, label in reversed(list(enumerate(labels.tolist())))}
    chosen = [first[label] for label in sorted(first)]
    places = torch.tensor(list(dict.fromkeys([*chosen[:CAM_IMAGES], *range(len(labels))]))[:CAM_IMAGES])
    pixels = _pixels(test, positions[places])
    if pixels is None:
        return None, {}
    groups = [(f"{title}, seed {seed}", each.maps[:CAM_MEMBERS, places]) for title, seed, each in shown]
    titles, seeds, _ = (list(column) for column in zip(*shown, strict=True))
    members = max(len(each) for _, each in groups)
    figure = CamFigure(CAM_FILE, titles, labels[places].tolist(), members, seeds)
    return figure, {CAM_FILE: _png(cam_grid(pixels, groups, cell=CAM_CELL).quantize(256))}


def _pixels(test: Examples, positions: Tensor) -> NDArray[np.uint8] | None:
    """RGB images (B, H, W, 3); None for inputs that are not images."""
    try:
        return displayable(test.select(positions))
    except ValueError:
        return None


def _png(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG", optimize=True)
    return data.getvalue()
