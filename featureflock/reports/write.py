"""Write a report from evaluation results, and read results again.

    results.json    every number
    images/         PNG files that the results name
    table.md        the main tables as Markdown
    table.tex       the main tables for LaTeX
    figures/        every figure as an SVG file
    report.html     everything on one page

The files are functions of results.json and images/ alone.
"""

import io
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from PIL import Image

from featureflock.evaluation.results import EvaluationResults
from featureflock.reports.formats import latex, latex_text, main_tables, markdown
from featureflock.reports.page import build_sections, render_page
from featureflock.reports.plots import Figure, standalone
from featureflock.reports.rows import report_rows
from featureflock.utils.files import read_regular, write_atomically
from featureflock.version import __version__


def write_report(results: EvaluationResults, images: Mapping[str, bytes], folder: Path) -> Path:
    """Write all files of a report and return the path of report.html.

    Args:
        results: what to report.
        images: PNG files by the names that the results use.
        folder: output folder; created if it does not exist.
    """
    write_tables(results, images, folder)
    sections = build_sections(results, images)
    for section in sections:
        for part in section.parts:
            if isinstance(part, Figure):
                _write(folder / "figures" / f"{part.name}.svg", standalone(part))
    _write(folder / "report.html", render_page(results, sections))
    return folder / "report.html"


def write_tables(results: EvaluationResults, images: Mapping[str, bytes], folder: Path) -> list[Path]:
    """Write results.json, images/, table.md and table.tex only; return the paths of the three files."""
    report_rows(results)  # refuses results without groups or runs
    tables = main_tables(results)
    title = f"{results.data}: {results.examples} test examples"
    comment = (
        f"% {latex_text(title)}, by featureflock {__version__}. "
        "Needs \\usepackage{booktabs}, and \\usepackage{amssymb} for triangles.\n"
    )
    parts = [f"# {title}\n", *(f"## {table.title}\n\n{markdown(table)}" for table in tables)]
    files = {
        "results.json": json.dumps(results.to_json(), indent=1, allow_nan=False) + "\n",
        "table.md": "\n".join([*parts, *(f"{note}\n" for note in results.notes)]),
        "table.tex": "\n".join([comment, *map(latex, tables)]),
    }
    for name, data in images.items():
        _write(folder / "images" / name, data)
    for name, text in files.items():
        _write(folder / name, text)
    return [folder / name for name in files]


def read_report(path: Path) -> tuple[EvaluationResults, dict[str, bytes]]:
    """Results and images from a results.json file, or from the folder that holds it."""
    file = path / "results.json" if path.is_dir() else path
    results = EvaluationResults.read(file)
    names = [example.image for example in results.disputed if example.image is not None]
    names += [results.cam_figure.image] if results.cam_figure is not None else []
    return results, {name: _read_image(file, name) for name in names}


def _read_image(file: Path, name: str) -> bytes:
    path = file.parent / "images" / name
    if PurePosixPath(name).name != name:
        raise ValueError(f"{file} names an image {name!r} outside of images/; evaluate the runs again.")
    try:
        data = read_regular(path)
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            image.verify()
    except PermissionError:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        state = "is not a PNG image" if path.exists() else "is missing"
        raise ValueError(f"{path}, named in {file.name}, {state}; evaluate the runs again.") from error
    return data


def _write(path: Path, content: str | bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"{path} could not be written ({reason}); choose another folder or free some space.") from error
