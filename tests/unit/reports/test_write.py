"""Reports as files: everything is written from results and images, and can be written again from results.json."""

import json
import math
import re
import shutil
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from helpers.made_evaluations import make_images, make_results
from PIL import Image

from featureflock.cli.report import main as report_command
from featureflock.evaluation.results import EvaluationResults
from featureflock.reports import read_report, write_report, write_tables
from featureflock.reports.page import build_sections, render_page


@pytest.fixture(scope="module")
def results():
    return make_results(seeds=(0, 1), views=("left", "right"))


@pytest.fixture
def written(results, tmp_path):
    return write_report(results, make_images(results), tmp_path / "new" / "folder").parent


def test_all_files_are_written(results, written, tmp_path):
    names = ["figures", "images", "report.html", "results.json", "table.md", "table.tex"]
    assert sorted(path.name for path in written.iterdir()) == names
    assert EvaluationResults.from_json(json.loads((written / "results.json").read_text())) == results
    assert "**" in (written / "table.md").read_text()
    assert r"\toprule" in (written / "table.tex").read_text()
    assert {path.name: path.read_bytes() for path in (written / "images").iterdir()} == make_images(results)
    paths = write_tables(results, make_images(results), tmp_path / "tables")
    assert [path.name for path in paths] == ["results.json", "table.md", "table.tex"]
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == ["images", *map(str, sorted(names[3:]))]


def test_a_report_is_written_again_from_its_results(written, tmp_path):
    """Byte for byte, from the folder or from the file."""
    for k, source in enumerate((written, written / "results.json")):
        again = write_report(*read_report(source), tmp_path / str(k)).parent
        files = {path.relative_to(written) for path in written.rglob("*") if path.is_file()}
        assert files == {path.relative_to(again) for path in again.rglob("*") if path.is_file()}
        for file in files:
            assert (again / file).read_bytes() == (written / file).read_bytes(), file


@pytest.mark.parametrize("write", [write_report, write_tables])
def test_results_without_groups_or_runs_are_refused_in_one_sentence(results, tmp_path, write):
    emptied = replace(results.groups[0], runs=[])
    for groups, message in (
        ([], "These results have no groups of runs; evaluate the runs again."),
        ([emptied], "The group 'Deep Ensembles' of these results has no runs; evaluate the runs again."),
    ):
        with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"):
            write(replace(results, groups=groups), {}, tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_figures_are_files_with_their_legends(results, written):
    texts = list(ElementTree.parse(written / "figures" / "severity.svg").getroot().itertext())
    assert all(group.title in texts for group in results.groups)
    shown = set(re.findall(r'<figure[^>]*id="figure-([\w-]+)"', (written / "report.html").read_text())) - {"maps"}
    assert {path.stem for path in (written / "figures").iterdir()} == shown
    assert "sizes" not in shown  # all ensembles were trained with the same number of members


def test_each_figure_is_drawn_once(results, tmp_path, monkeypatch):
    from featureflock.reports import figures

    drawn, draw = [], figures.severity_boxes
    monkeypatch.setattr(figures, "severity_boxes", lambda rows: drawn.append(1) or draw(rows))
    write_report(results, make_images(results), tmp_path)
    assert len(drawn) == 1


def damage(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def truncate(file):
    file.write_bytes(file.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda f: damage(f / "results.json", schema_version=99),
            r"results\.json.*schema version 99.*evaluate the runs",
        ),
        (lambda f: (f / "results.json").write_text("[1]"), r"results\.json is damaged .*content must be dict"),
        (lambda f: (f / "results.json").write_text('{"data": "Dig'), r"results\.json is damaged: it is not valid JSON"),
        (
            lambda f: damage(f / "results.json", classes="ten"),
            r"results\.json is damaged or was modified \(content\.classes must be int; got 'ten'\); evaluate the runs",
        ),
        (
            lambda f: damage(f / "results.json", provenance={"x": math.nan}),
            r"results\.json is damaged: JSON has no NaN",
        ),
        (lambda f: (f / "results.json").write_text("[" * 50_000), r"results\.json is damaged: its JSON is nested too"),
        (lambda f: damage(f / "results.json", examples=10**400), r"results\.json is damaged: the number 1000.* is too"),
        (lambda f: damage(f / "results.json", runs=[]), r"no run 'Deep Ensembles-0'.*evaluate the runs again"),
        (lambda f: (f / "results.json").unlink(), r"results\.json is missing; evaluate the runs again"),
        (lambda f: (f / "images" / "maps.png").unlink(), r"maps\.png, named in results\.json, is missing; evaluate"),
        (lambda f: truncate(f / "images" / "maps.png"), r"maps\.png, .* is not a PNG image; evaluate"),
        (lambda f: Image.new("L", (8, 8)).save(f / "images" / "maps.png", "GIF"), r"maps\.png, .* is not a PNG image"),
        (lambda f: shutil.rmtree(f / "images"), r"disputed-clean-0\.png, named in results\.json, is missing"),
    ],
    ids=[
        *("version", "list", "cut", "type", "NaN", "brackets", "huge", "no runs"),
        *("no file", "no image", "truncated", "GIF", "no images"),
    ],
)
def test_damaged_results_are_reported_in_one_sentence(written, tmp_path, spoil, message):
    spoil(written)
    with pytest.raises((OSError, ValueError), match=message) as error:
        write_report(*read_report(written), tmp_path / "again")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": []},
        {"clean": {"calibrated": {}, "raw": {}, "temperatures": [], "examples": 1}},
        {"curves": [{"epoch": [1], "validation": 5}]},
        {"environment": [{"machine": 5, "versions": []}]},
        {"training": {"parameters": "many"}},
    ],
    ids=str,
)
def test_the_command_refuses_results_without_the_values_of_the_report(written, tmp_path, changes):
    content = json.loads((written / "results.json").read_text())
    (content if "groups" in changes else content["runs"][0]).update(changes)
    (written / "results.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"results\.json lacks values of the report or .* Evaluate the runs again\."):
        report_command([str(written), "--out", str(tmp_path / "again")])


@pytest.mark.parametrize("name", ["../secret.png", "/etc/secret.png", "a/b.png"])
def test_images_outside_of_the_folder_are_refused(written, name):
    content = json.loads((written / "results.json").read_text())
    content["cam_figure"]["image"] = name
    (written / "results.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"outside of images/; evaluate the runs again"):
        read_report(written)


def test_a_folder_that_cannot_be_made_is_an_error_in_one_sentence(results, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"could not be written .*; choose another folder"):
        write_report(results, make_images(results), tmp_path / "file")


SECTIONS = ("corruption", "size", "members", "views", "maps", "disagreement", "uncertainty", "training")
NOTHING = {"seeds": (0,), "corruptions": (), "ood": (), "maps": False}
ALWAYS = {"views"}


@pytest.mark.parametrize(
    ("methods", "more", "missing"),
    [
        (["Deep Ensembles"], NOTHING, {"corruption", "maps"}),
        (["Single"], NOTHING, {"corruption", "maps", "size", "members", "disagreement"}),
        (["Single", "Deep Ensembles", "feature-WGD"], {"seeds": (0,), "corruptions": ("fog",)}, set()),
        (["Deep Ensembles", "feature-WGD"], NOTHING | {"images": False}, {"corruption", "maps"}),
        (["feature-WGD"], NOTHING | {"names": ()}, {"corruption", "maps"}),
    ],
    ids=["one run", "one network", "with a single network", "no images", "no class names"],
)
def test_sections_without_results_are_left_out(methods, more, missing):
    results = make_results(methods, **more)
    html = render_page(results, build_sections(results, make_images(results)))
    html = re.sub(r"base64,[^\"]*", "", html)
    assert {name for name in SECTIONS if f'<section id="{name}">' not in html} == missing | ALWAYS
    assert not re.search(r">\s*(None|nan)\b|NaN|\binf\b", html)
    assert html.count("<svg") >= 3
