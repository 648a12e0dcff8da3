"""featureflock predict: a trained run's opinion of pictures."""

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from PIL import Image
from rich import box
from rich.table import Table

from featureflock.cli.terminal import make_console
from featureflock.evaluation.cam_cache import has_convolutions
from featureflock.evaluation.cam_figure import cam_grid
from featureflock.evaluation.classify import ImagePrediction, RunClassifier
from featureflock.evaluation.predictions import Predictor
from featureflock.evaluation.runs import read_run
from featureflock.training import ComputeConfig
from featureflock.utils.files import write_atomically


@dataclass(frozen=True)
class Options:
    """Classify pictures with a trained run: label, calibrated probability, and how much the members agree.

    Pictures of another size are scaled and cut to what the network was trained on, in colour or grey.
    """

    run: Annotated[Path, tyro.conf.arg(metavar="RUN"), tyro.conf.Positional]
    """Folder that `featureflock train` made."""
    pictures: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PICTURE …"), tyro.conf.Positional]
    """Picture files: PNG, JPEG, …"""
    top: int = 3
    """How many of the most probable classes to name."""
    explain: bool = False
    """Also draw where each member looks (class activation maps)."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("featureflock-explanation.png")
    """File for what --explain draws."""
    json: bool = False
    """Print JSON instead of a table."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, …; auto: a CUDA GPU if there is one, else the CPU."""


def main(args: list[str]) -> None:
    """Run `featureflock predict` with these arguments."""
    options = tyro.cli(Options, prog="featureflock predict", args=args)
    if not options.pictures:
        raise ValueError("Say which pictures: featureflock predict RUN picture.png …")
    if options.top < 1:
        raise ValueError(f"--top must be at least 1; got {options.top}.")
    if options.explain:
        _check_drawing(options.out)
    console = make_console()

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    run = read_run(options.run)
    predictor = Predictor(run, ComputeConfig(device=options.device))
    if options.explain and not has_convolutions(predictor):
        raise ValueError("--explain is for networks with convolutions, which this run has not; leave it out.")
    classifier = RunClassifier(run, predictor, say)
    read: list[tuple[Path, Image.Image, str]] = []
    refused = []
    for path in options.pictures:
        try:
            read.append((path, *classifier.read(path)))
        except (OSError, ValueError) as error:
            refused.append(str(error))
    answers = classifier.classify(read, options.top) if read else []
    if options.json:
        print(json.dumps([_as_json(answer, classifier.temperature) for answer in answers], indent=1))
    elif answers:
        console.print(_table(answers))
        for answer in answers:
            if answer.note:
                console.print(f"{answer.path}: {answer.note}", soft_wrap=True)
        if classifier.calibrated_on:
            how = f"calibrated on {classifier.calibrated_on} (temperature {classifier.temperature:.3f})"
            console.print(f"Probabilities are {how}.", soft_wrap=True)
    if options.explain and read:
        _draw(_explain(classifier, read, answers), options.out)
        say(f"wrote {options.out}")
    if refused:
        raise ValueError(" ".join(refused))


def _check_drawing(path: Path) -> None:
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"--out {path} cannot be written; give a file in a folder that exists.")
    if path.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise ValueError(f"--out {path} must end in .png, .jpg or .webp.")


def _draw(picture: Image.Image, path: Path) -> None:
    """All of the file or nothing."""
    data = io.BytesIO()
    try:
        picture.save(data, Image.registered_extensions()[path.suffix.lower()])
        write_atomically(path, data.getvalue())
    except (OSError, ValueError) as error:
        size = f"{picture.width} × {picture.height}"
        raise ValueError(
            f"What --explain draws, {size} pixels, cannot be written to {path} ({error}); give another --out, such as "
            "a .png, or fewer pictures."
        ) from error


def _table(answers: list[ImagePrediction]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("picture", "label", "probability", "members that agree", "then"):
        table.add_column(heading)
    for answer in answers:
        first, *others = answer.guesses
        table.add_row(
            str(answer.path),
            first.name,
            f"{100 * first.probability:.1f} %",
            f"{answer.votes} of {len(answer.members)}",
            ", ".join(f"{guess.name} {100 * guess.probability:.1f} %" for guess in others),
        )
    return table


def _as_json(answer: ImagePrediction, temperature: float) -> dict[str, object]:
    first = answer.guesses[0]
    return {
        "picture": str(answer.path),
        "label": first.name,
        "probability": first.probability,
        "temperature": temperature,
        "votes": answer.votes,
        "members": [guess._asdict() for guess in answer.members],
        "mutual_information": answer.mutual_information,
        "top": [guess._asdict() for guess in answer.guesses],
        "note": answer.note,
    }


def _explain(
    classifier: RunClassifier, read: list[tuple[Path, Image.Image, str]], answers: list[ImagePrediction]
) -> Image.Image:
    """The members' maps over each picture, with what each member would say."""
    pictures = np.stack([np.array(picture.convert("RGB")) for _, picture, _ in read])
    texts = [[answer.members[i].name for answer in answers] for i in range(len(answers[0].members))]
    title = "Where each member looks"
    return cam_grid(pictures, [(title, classifier.maps(read), texts)])
