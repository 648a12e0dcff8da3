"""Images for the report: those that members disagree about, and class activation maps on a few images.

Disputed examples are the ones with the largest mutual information between prediction and member, among the clean, the
corrupted and the OOD test sets separately. One test set is read at a time, and only the chosen images are loaded.

Shapes: n members, B examples, h × w pixels of a map.
"""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
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
from featureflock.evaluation.test_sets import Kind

DISPUTED, MAX_SIZE = 6, 224
"""Number of disputed examples of each kind of test set, and the largest side of their images in pixels."""
CAM_IMAGES, CAM_GROUPS, CAM_MEMBERS, CAM_CELL = 6, 4, 5, 72
CAM_FILE = "class-activation-maps.png"
_BATCH = 4096

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
        tops, classes, information = [], [], []
        for log_probs in predictions.log_probs.split(_BATCH, 1):
            probs = log_probs.double().exp()
            top, top_class = probs.max(-1)
            tops.append(top)
            classes.append(top_class)
            information.append(mutual_information(probs))
        votes = torch.cat(classes, 1), torch.cat(tops, 1), torch.cat(information)
        return cls(predictions.positions, predictions.labels, *votes)


class VotedSet(NamedTuple):
    """A test set, and what the members predict on it."""

    kind: Kind
    name: str
    votes: Callable[[], Mapping[str, MemberVotes]]
    """Returns the votes by group title, of groups with several members."""
    load: Callable[[Tensor], Examples] | None = None
    """The examples at some positions; None if there are no inputs."""


def disputed_examples(test_sets: Iterable[VotedSet], count: int = DISPUTED) -> tuple[list[DisputedExample], Images]:
    """For each kind of test set, the `count` examples that members dispute most, and their images.

    Several test sets of a kind take turns, the one with the most disputed example first. An image appears once among
    the corrupted ones.
    """
    candidates: dict[Kind, list[list[_Candidate]]] = {}
    for test_set in test_sets:
        if test_set.kind in ("clean", "corrupted", "ood"):
            found = [_Candidate(example, test_set) for example in _most_disputed(test_set, count)]
            candidates.setdefault(test_set.kind, []).append(found)
    examples, images = [], {}
    for kind, queues in candidates.items():
        for k, (example, test_set) in enumerate(_in_turn(queues, count)):
            pixels = None if test_set.load is None else _pixels(test_set.load(torch.tensor([example.position])))
            if pixels is not None:
                name, image = f"disputed-{kind}-{k + 1}.png", Image.fromarray(pixels[0])
                image.thumbnail((MAX_SIZE, MAX_SIZE))
                example, images[name] = replace(example, image=name), _png(image)
            examples.append(example)
    return examples, images


class _Candidate(NamedTuple):
    example: DisputedExample
    test_set: VotedSet

    @property
    def image(self) -> tuple[str, int]:
        """The image before it was corrupted."""
        return "" if self.test_set.kind == "corrupted" else self.test_set.name, self.example.position


def _in_turn(queues: list[list[_Candidate]], count: int) -> list[_Candidate]:
    """The first of each queue whose image is not chosen yet, then the next of each, and so on."""
    chosen: dict[tuple[str, int], _Candidate] = {}
    while len(chosen) < count and (queues := [queue for queue in queues if queue]):
        for queue in sorted(queues, key=lambda queue: -queue[0].example.mutual_information):
            if (first := next((each for each in queue if each.image not in chosen), None)) is not None:
                chosen[first.image] = first
        queues = [[each for each in queue if each.image not in chosen] for queue in queues]
    return list(chosen.values())[:count]


def _most_disputed(test_set: VotedSet, count: int) -> list[DisputedExample]:
    """The examples with the largest mutual information, mean over groups, without images."""
    votes = test_set.votes()
    if not votes:
        return []
    positions, *others = (each.positions for each in votes.values())
    for other in others:  # an unreadable example may be missing from some
        positions = positions[torch.isin(positions, other)]
    masks = {title: torch.isin(each.positions, positions) for title, each in votes.items()}
    parts = {title: MemberVotes(*(part[..., masks[title]] for part in each)) for title, each in votes.items()}
    information_b = torch.stack([part.mutual_information for part in parts.values()]).mean(0)
    labels, examples = next(iter(parts.values())).labels, []
    for b in information_b.argsort(descending=True, stable=True)[:count].tolist():
        tops = {title: (part.classes[:, b].tolist(), part.probs[:, b].tolist()) for title, part in parts.items()}
        predictions = {title: list(zip(*pair, strict=True)) for title, pair in tops.items()}
        label = None if test_set.kind == "ood" else int(labels[b])
        about = int(positions[b]), label, float(information_b[b]), None, predictions, test_set.kind, test_set.name
        examples.append(DisputedExample(*about))
    return examples


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
    pixels = _pixels(test.select(positions[places]))
    if pixels is None:
        return None, {}
    groups = [(f"{title}, seed {seed}", each.maps[:CAM_MEMBERS, places]) for title, seed, each in shown]
    titles, seeds, _ = (list(column) for column in zip(*shown, strict=True))
    members = max(len(each) for _, each in groups)
    figure = CamFigure(CAM_FILE, titles, labels[places].tolist(), members, seeds)
    return figure, {CAM_FILE: _png(cam_grid(pixels, groups, cell=CAM_CELL).quantize(256))}


def _pixels(examples: Examples) -> NDArray[np.uint8] | None:
    """RGB images (B, H, W, 3); None for inputs that are not images."""
    try:
        return displayable(examples)
    except ValueError:
        return None


def _png(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG", optimize=True)
    return data.getvalue()
