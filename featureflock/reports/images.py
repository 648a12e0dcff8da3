"""Figures made of images: those that members dispute most, and class activation maps."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image

from featureflock.evaluation.results import DisputedExample, EvaluationResults
from featureflock.reports.rows import ReportRow
from featureflock.reports.tables import in_words

_DISPLAY = 112
"""Size of a disputed image on the page, in CSS pixels."""
_KINDS = {
    "clean": ("Clean test set", "The most disputed examples of the clean test set."),
    "corrupted": (
        "Corrupted test sets",
        "The test sets take turns; an image appears once.",
    ),
    "ood": ("OOD sets", "The OOD sets take turns. None of the classes is correct."),
}
"""Title and choice for each kind of test set."""
_MEASURE = (
    "Disputed: a large mutual information between prediction and member (epistemic uncertainty, in nats), where "
    "members are confident of different classes; mean over the first run of each ensemble. For each member its most "
    "probable class, before calibration; ✓ marks correct predictions."
)


@dataclass(frozen=True)
class DisputedImage:
    """An example that members disagree about."""

    position: int
    label: str
    """Its class; for OOD inputs the name of their set."""
    place: str
    """Test set and position in words."""
    mutual_information: str
    uri: str
    """data: URI of the image; empty for inputs that are not images."""
    alt: str
    width: int
    labelled: bool
    predictions: list[tuple[ReportRow, list[tuple[str, str, bool]]]]
    """Each member's most probable class, its probability, and whether it is correct."""


@dataclass(frozen=True)
class DisputedImages:
    """Examples of one kind of test set."""

    name: str
    title: str
    examples: list[DisputedImage]
    caption: str
    kind: str = "disputed"


@dataclass(frozen=True)
class ImageFigure:
    """An image with a caption."""

    uri: str
    alt: str
    caption: str
    width: int
    kind: str = "image"


def disputed_images(
    results: EvaluationResults, images: Mapping[str, bytes], rows: Sequence[ReportRow]
) -> list[DisputedImages]:
    """The most disputed examples with each member's prediction, by kind of test set; none if all rows are networks."""
    blocks: list[DisputedImages] = []
    for kind, (title, chosen) in _KINDS.items():
        if examples := [_disputed(results, images, rows, each) for each in results.disputed if each.kind == kind]:
            caption = f"{chosen} {_MEASURE}" if not blocks else chosen
            blocks.append(DisputedImages(kind, title, examples, caption))
    return blocks


def cam_figure(
    results: EvaluationResults, images: Mapping[str, bytes], rows: Sequence[ReportRow]
) -> ImageFigure | None:
    """Class activation maps of members over a few test images; None if there are none."""
    figure = results.cam_figure
    if figure is None:
        return None
    shown = figure.members_shown
    some = f" The first {shown} members are shown." if any(row.group.members > shown for row in rows) else ""
    caption = (
        "Beside each test image the class activation map (Grad-CAM) of each member for the class that the ensemble "
        f"predicts; bright regions support it. The images are the first of each class, not selected.{some}"
    )
    classes = in_words(_with_article(_class_name(results, label)) for label in figure.labels)
    groups = (f"{title} (seed {seed})" for title, seed in zip(figure.groups, figure.seeds, strict=True))
    uri, width, _ = _encode(images[figure.image])
    return ImageFigure(uri, f"Class activation maps of {in_words(groups)}, over images of {classes}.", caption, width)


def _disputed(
    results: EvaluationResults, images: Mapping[str, bytes], rows: Sequence[ReportRow], example: DisputedExample
) -> DisputedImage:
    predictions = []
    for row in rows:
        if members := example.predictions.get(row.title):
            shown = [(_class_name(results, k), f"{100 * p:.0f}\u202f%", k == example.label) for k, p in members]
            predictions.append((row, shown))
    uri, width = "", 0
    if example.image is not None:
        uri, width, height = _encode(images[example.image])
        longest = max(width, height)  # small images are enlarged by a whole factor, so that each pixel is a square
        width = width * (_DISPLAY // longest) if longest <= _DISPLAY else round(_DISPLAY * width / longest)
    name = example.test_set if example.label is None else _class_name(results, example.label)
    place, alt = f"test example {example.position}", f"test image {example.position}, {_with_article(name)}"
    if example.kind == "corrupted":
        corruption, _, severity = example.test_set.rpartition("-")
        where = f"{corruption.replace('_', ' ')}, severity {severity}"
        place, alt = f"{where}; {place}", f"{alt}, with {where}"
    elif example.label is None:
        place = f"OOD input {example.position}"
        alt = f"{place} of {name}"
    information = f"{example.mutual_information:.3f}"
    labelled = example.label is not None
    return DisputedImage(example.position, name, place, information, uri, alt, width, labelled, predictions)


def _class_name(results: EvaluationResults, label: int) -> str:
    return results.class_names[label] if label < len(results.class_names) else f"class {label}"


def _with_article(name: str) -> str:
    return f"{'an' if name[:1].lower() in tuple('aeio8') else 'a'} {name}"


def _encode(png: bytes) -> tuple[str, int, int]:
    """data: URI, width and height."""
    with Image.open(io.BytesIO(png)) as image:
        return "data:image/png;base64," + base64.b64encode(png).decode(), *image.size
