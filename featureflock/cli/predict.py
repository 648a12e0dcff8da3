"""featureflock predict: classify image files, or predict the rows of a CSV file, with a trained run."""

import io
import json
import sys
from dataclasses import dataclass
from functools import partial
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
from featureflock.evaluation.classify import ImagePrediction, ReadImage, RunClassifier
from featureflock.evaluation.predictions import Predictor
from featureflock.evaluation.runs import TrainedRun, read_run
from featureflock.evaluation.tables_of_inputs import predict_rows
from featureflock.training import ComputeConfig
from featureflock.utils.files import write_atomically


@dataclass(frozen=True)
class Options:
    """Classify images with a trained run: class, calibrated probability, member agreement and epistemic uncertainty.

    Images are resized, cropped and converted to the format that the network was trained on. For a regression run, give
    a CSV file whose header names the columns of its inputs: mean and standard deviation of each row are printed.
    """

    run: Annotated[Path, tyro.conf.arg(metavar="RUN"), tyro.conf.Positional]
    """Run folder, as made by `featureflock train`."""
    images: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="IMAGE …"), tyro.conf.Positional]
    """Image files (PNG, JPEG, …), or one CSV file for a regression run."""
    top: int = 3
    """Number of most probable classes to print."""
    explain: bool = False
    """Also draw the class activation maps of each member."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("featureflock-explanation.png")
    """File for the figure of --explain."""
    json: bool = False
    """Print JSON instead of a table."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, …; auto: a CUDA GPU if there is one, else the CPU."""


def main(args: list[str]) -> None:
    """Run `featureflock predict` with these arguments."""
    options = tyro.cli(Options, prog="featureflock predict", args=args)
    if not options.images:
        raise ValueError("Give at least one image: featureflock predict RUN image.png …")
    if options.top < 1:
        raise ValueError(f"--top must be at least 1; got {options.top}.")
    out = options.out
    if options.explain and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise ValueError(f"--out {out} cannot be written; give a file in a folder that exists.")
    if options.explain and out.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise ValueError(f"--out {out} must end in .png, .jpg or .webp.")
    console, log, run = make_console(), partial(print, file=sys.stderr), read_run(options.run)
    predictor = Predictor(run, ComputeConfig(device=options.device))
    if options.images[0].suffix.lower() == ".csv":
        _predict_table(options, run, predictor)
        return
    if options.explain and not has_convolutions(predictor):
        raise ValueError("--explain needs convolutional networks; leave it out for this run.")
    classifier = RunClassifier(run, predictor, log)
    read, refused = list[ReadImage](), list[str]()
    for path in options.images:
        try:
            read.append((path, *classifier.format.read(path)))
        except (OSError, ValueError) as error:
            refused.append(str(error))
    predictions = classifier.classify(read, options.top) if read else []
    if options.json:
        print(json.dumps([_as_json(each, classifier.temperature) for each in predictions], indent=1))
    elif predictions:
        console.print(_table(predictions))
        lines = [f"{prediction.path}: {prediction.note}" for prediction in predictions if prediction.note]
        if classifier.calibrated_on:
            source = f"{classifier.calibrated_on} (temperature {classifier.temperature:.3f})"
            lines.append(f"Probabilities are calibrated on {source}.")
        lines.append("Epistemic uncertainty is 0 where all members predict the same probabilities.")
        console.print("\n".join(lines), soft_wrap=True)
    if options.explain and read:
        _explain(classifier, read, predictions, out)
        log(f"wrote {out}")
    if refused:
        raise ValueError(" ".join(refused))


def _predict_table(options: Options, run: TrainedRun, predictor: Predictor) -> None:
    if len(options.images) > 1 or options.explain:
        raise ValueError("Give one CSV file, without --explain.")
    if (task := predictor.ensemble.task).kind != "regression":
        raise ValueError(f"CSV files are for regression runs; this run is for {task.name}.")
    rows = predict_rows(predictor, run.inputs, options.images[0])
    if options.json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
        return
    table = Table("row", "mean", "standard deviation", "epistemic part", box=box.SIMPLE_HEAD, show_edge=False)
    for row in rows:
        table.add_row(str(row.row), *(f"{value:.5g}" for value in row[1:]))
    make_console().print(table)


def _table(predictions: list[ImagePrediction]) -> Table:
    headings = ("image", "top class", "probability", "members agreeing", "epistemic, nats", "next")
    table = Table(*headings, box=box.SIMPLE_HEAD)
    for prediction in predictions:
        first, *others = prediction.top
        table.add_row(
            str(prediction.path),
            first.name,
            f"{100 * first.probability:.1f} %",
            f"{prediction.agreeing} of {len(prediction.members)}",
            f"{prediction.mutual_information:.3f}",
            ", ".join(f"{each.name} {100 * each.probability:.1f} %" for each in others),
        )
    return table


def _as_json(prediction: ImagePrediction, temperature: float) -> dict[str, object]:
    first = prediction.top[0]
    return {
        "image": str(prediction.path),
        "label": first.name,
        "probability": first.probability,
        "temperature": temperature,
        "members_agreeing": prediction.agreeing,
        "members": [each._asdict() for each in prediction.members],
        "mutual_information": prediction.mutual_information,
        "top": [each._asdict() for each in prediction.top],
        "note": prediction.note,
    }


def _explain(classifier: RunClassifier, read: list[ReadImage], predictions: list[ImagePrediction], path: Path) -> None:
    """Draw the class activation maps of each member over each image, with the members' predictions."""
    images = np.stack([np.array(image.convert("RGB")) for _, image, _ in read])
    texts = [[each.members[i].name for each in predictions] for i in range(len(predictions[0].members))]
    figure, data = cam_grid(images, [("Class activation maps", classifier.maps(read), texts)]), io.BytesIO()
    try:
        figure.save(data, Image.registered_extensions()[path.suffix.lower()])
        write_atomically(path, data.getvalue())
    except (OSError, ValueError) as error:
        what = f"The figure of {figure.width} × {figure.height} pixels cannot be written to {path} ({error})"
        raise ValueError(f"{what}; give another --out, such as a .png, or fewer images.") from error
