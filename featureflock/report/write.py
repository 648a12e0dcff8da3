"""The files of a report, each written whole or not at all."""

import base64
import json
from pathlib import Path

from featureflock.evaluation.evaluate_runs import Evaluation
from featureflock.report import figures
from featureflock.report.cam_grid import map_grid
from featureflock.report.formats import latex, latex_text, markdown
from featureflock.report.page import page
from featureflock.report.panels import alone
from featureflock.report.rows import shown_settings
from featureflock.report.tables import comparison, differences
from featureflock.report.views import view_figure, view_tables
from featureflock.utils.files import write_atomically
from featureflock.version import __version__


def write_report(evaluation: Evaluation, folder: Path) -> Path:
    """Write the page report.html, results.json, table.md and table.tex into a folder; gives the page's path.

    The paper's figures, where there are numbers for them, stand beside it as files of their own: severity.svg,
    sizes.svg, map_similarity.svg and maps.png; for data with two views also views.svg.
    """
    html, settings = page(evaluation).encode(), shown_settings(evaluation)
    found = {
        "severity": figures.corruption_boxes(settings),
        "sizes": figures.by_trained_size(settings),
        "map_similarity": figures.map_similarity(settings),
        "views": view_figure(settings),
    }
    maps = map_grid(evaluation, settings)
    write_tables(evaluation, folder)
    for name, figure in found.items():
        if figure is not None:
            _write(folder / f"{name}.svg", alone(figure).encode())
    if maps is not None:
        _write(folder / "maps.png", base64.b64decode(maps.picture.partition(",")[2]))
    path = folder / "report.html"
    _write(path, html)
    return path


def write_tables(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Write results.json, table.md and table.tex only; gives their paths."""
    results = evaluation.results
    tables = [table for table in (comparison(results), differences(results), *view_tables(results)) if table]
    title = f"{results['data']}: {results['examples']} test examples"
    text = "\n".join(f"## {table.title}\n\n{markdown(table)}" for table in tables)
    source = (
        f"% {latex_text(title)}, by featureflock {__version__}. "
        "Needs \\usepackage{booktabs}, and \\usepackage{amssymb} for triangles.\n"
    )
    parts = [latex(table, f"tab:{table.name}") for table in tables]
    files = {
        "results.json": json.dumps(results, indent=1, allow_nan=False) + "\n",
        "table.md": f"# {title}\n\n{text}",
        "table.tex": "\n".join([source, *parts]),
    }
    for name, content in files.items():
        _write(folder / name, content.encode())
    return [folder / name for name in files]


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    except OSError as error:
        raise OSError(
            f"{path} could not be written ({error.strerror or error}); give another folder for the report or make room."
        ) from error
