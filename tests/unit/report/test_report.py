"""The report's tables, sentences and figures say what the numbers say, and escape what they are given."""

import io
import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from helpers.made_evaluations import TWO, make_evaluation
from rich.console import Console

from featureflock.evaluation import mean, mutual_information
from featureflock.evaluation.predictions import read
from featureflock.report import terminal_table, terminal_tables, write_report, write_tables
from featureflock.report.disagreement import disputes
from featureflock.report.figures import by_size, by_trained_size, corruption_boxes, reliability
from featureflock.report.findings import sentences, tiles
from featureflock.report.formats import latex, markdown
from featureflock.report.page import page
from featureflock.report.panels import box_of
from featureflock.report.per_run_tables import corruption_table, detection_table
from featureflock.report.rows import shown_settings
from featureflock.report.svg import nice_step, tag, ticks
from featureflock.report.tables import comparison, differences, fixed


def setting(title, metrics, *, seeds=3, **more):
    """`metrics` are means, or (mean, sd)."""
    pairs = {key: value if isinstance(value, tuple) else (value, None) for key, value in metrics.items()}
    return {
        "title": title,
        "method": title,
        "members": 5,
        "seeds": list(range(seeds)),
        "metrics": {key: {"mean": m, "sd": sd, "seeds": seeds} for key, (m, sd) in pairs.items()},
    } | more


def difference(mean, low=None, high=None, seeds=3):
    return {"mean": mean, "low": low, "high": high, "seeds": seeds}


def results_of(*settings):
    return {"data": "Digits", "examples": 100, "conditions": ["clean"], "settings": list(settings)}


THREE = results_of(
    setting("Deep Ensembles", {"accuracy": (0.9012, 0.002), "nll": (0.31, 0.01)}, deep_ensemble_equivalent=5.0),
    setting(
        "A & B_1",
        {"accuracy": (0.90124, 0.0015), "nll": (0.29996, 0.02)},
        deep_ensemble_equivalent="more than 5",
        against="Deep Ensembles",
        differences={"accuracy": difference(0.00004, -0.01, 0.01), "nll": difference(-0.01004, -0.02, -0.0001)},
    ),
    setting(
        "C",
        {"accuracy": (0.85, 0.001), "nll": (0.3, 0.0)},
        deep_ensemble_equivalent=1.0,
        against="Deep Ensembles",
        differences={"accuracy": difference(-0.0512, -0.06, -0.04), "nll": difference(-0.01, -0.03, 0.01)},
    ),
)


# ---- tables


def test_the_best_of_each_column_is_bold_and_so_is_what_prints_the_same():
    table = comparison(THREE)
    assert [head.title for head in table.heads] == ["Method", "Members", "Seeds", "Accuracy, %", "NLL", "DEE"]
    shown = [[(cell.text, cell.spread, cell.best) for cell in row[3:]] for row in table.rows]
    assert shown == [
        [("90.12", "0.20", True), ("0.3100", "0.0100", False), ("5.0", "", False)],
        [("90.12", "0.15", True), ("0.3000", "0.0200", True), ("> 5", "", True)],
        [("85.00", "0.10", False), ("0.3000", "0.0000", True), ("1.0", "", False)],
    ]


def test_one_seed_has_no_deviation_and_one_row_no_best():
    table = comparison(results_of(setting("Single", {"accuracy": 0.5}, seeds=1)))
    assert table.rows[0][3].plain == "50.00"
    assert not any(cell.best for cell in table.rows[0])
    assert differences(results_of(setting("Single", {"accuracy": 0.5}))) is None


def test_what_a_setting_lacks_is_neither_shown_nor_best():
    table = comparison(results_of(setting("A", {"accuracy": 0.5, "ece": 0.1}), setting("B", {"accuracy": 0.4})))
    assert [(row[4].text, row[4].best, row[4].value) for row in table.rows] == [
        ("0.1000", False, 0.1),
        ("–", False, None),
    ]


def test_differences_beyond_noise_are_marked_by_what_is_better():
    rows = differences(THREE).rows
    assert [[cell.plain for cell in row[1:]] for row in rows] == [
        ["+0.00 [−1.00, 1.00]", "−0.0100 [−0.0200, −0.0001] ▲"],
        ["−5.12 [−6.00, −4.00] ▼", "−0.0100 [−0.0300, 0.0100]"],
    ]
    assert [cell.verdict for row in rows for cell in row[1:]] == ["unclear", "better", "worse", "unclear"]


def test_shared_seeds_have_a_column_where_they_differ():
    found = differences(
        results_of(
            setting("A", {}, against="D", differences={"nll": difference(1.0, 0.5, 1.5, seeds=3)}),
            setting("B", {}, against="D", differences={"nll": difference(1.0, None, None, seeds=1)}),
        )
    )
    assert [head.title for head in found.heads] == ["Method", "Shared seeds", "NLL"]
    assert [row[1].text for row in found.rows] == ["3", "1"]
    assert found.rows[1][2].plain == "+1.0000"


@pytest.mark.parametrize(
    ("value", "sign", "text"),
    [
        (1.234, False, "1.23"),
        (-1.235, True, "−1.24"),
        (0.5, True, "+0.50"),
        (-0.001, False, "0.00"),
        (-0.001, True, "+0.00"),
    ],
)
def test_numbers_have_fixed_digits_and_no_negative_zero(value, sign, text):
    assert fixed(value, 2, sign) == text


# ---- Markdown, LaTeX, a terminal


def test_markdown_has_as_many_cells_in_each_row():
    table = comparison(results_of(setting("a|b*c [x](y)", {"nll": (0.3, 0.1)}), setting("<i>", {"nll": (0.4, 0.1)})))
    lines = markdown(table).splitlines()[:4]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {5}
    assert r"| a\|b\*c [x]\(y) | 5 | 3 | **0.3000 ± 0.1000** |" in lines
    assert "&lt;i>" in lines[3]


def test_latex_escapes_and_has_as_many_cells_as_columns():
    hostile = r"50% of_$x^2$ & {#1} ~\end{table}"
    text = latex(comparison(results_of(setting(hostile, {"nll": (0.3, 0.1)}), setting("B", {"nll": 0.2}))), "tab:x")
    assert (
        r"50\% of\_\$x\textasciicircum{}2\$ \& \{\#1\} \textasciitilde{}\textbackslash{}end\{table\} "
        r"& 5 & 3 & 0.3000 $\pm$ 0.1000 \\"
    ) in text
    assert r"B & 5 & 3 & \textbf{0.2000} \\" in text
    assert text.count(r"\end{table}") == 1
    (shape,) = re.findall(r"\\begin{tabular}{(\w+)}", text)
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(shape)} == {4}
    assert not re.search(r"[^\x00-\x7f]", text)


def printed(table):
    console = Console(width=100, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(table)
    return console.file.getvalue()


def test_a_terminal_shows_titles_as_they_are_and_the_best_in_bold():
    text = printed(terminal_table(results_of(setting("[red]x[/red]", {"nll": (0.3, 0.1)}), setting("y", {"nll": 0.4}))))
    assert "[red]x[/red]" in text
    assert re.search(r"\x1b\[1m[^\x1b]*0\.3000 ± 0\.1000", text)
    assert not re.search(r"\x1b\[1m[^\x1b]*0\.4000", text)


def test_a_terminal_shows_differences_if_there_are_any():
    assert len(terminal_tables(results_of(setting("A", {"nll": 0.3})))) == 1
    assert "−0.0100 [−0.0200, −0.0001] ▲" in printed(terminal_tables(THREE)[1])


# ---- sentences


def said(results):
    return [f"{sentence.lead} {sentence.text}".strip() for sentence in sentences(results)]


def test_the_summary_says_what_goes_beyond_noise():
    assert said(THREE) == [
        "By the means over seeds, Deep Ensembles and A & B_1 are equally best on accuracy; A & B_1 and C are equally "
        "best on NLL.",
        "A & B_1 against Deep Ensembles, over 3 shared seeds: better beyond noise on NLL (−0.0100); no difference "
        "beyond noise on accuracy.",
        "C against Deep Ensembles, over 3 shared seeds: worse beyond noise on accuracy (−5.12 points); no difference "
        "beyond noise on NLL.",
    ]
    assert [(tile.title, tile.value, tile.who) for tile in tiles(THREE)] == [
        ("Accuracy", "90.12\u202f%", "Deep Ensembles and A & B_1"),
        ("NLL", "0.3000", "A & B_1 and C"),
    ]


def test_the_summary_says_when_there_is_no_difference():
    alike = {"accuracy": difference(0.01, -0.01, 0.03), "nll": difference(0.0, 0.0, 0.0)}
    base = setting("Deep Ensembles", {"accuracy": 0.9, "nll": 0.3})
    others = [setting(t, {"accuracy": 0.9, "nll": 0.3}, against=base["title"], differences=alike) for t in ("A", "B")]
    assert "A and B against Deep Ensembles, over 3 shared seeds: no difference beyond noise on any metric." in said(
        results_of(base, *others)
    )


def test_the_summary_says_what_one_seed_is_worth():
    apart = {"nll": difference(-1.0, seeds=1)}
    base = setting("Deep Ensembles", {"nll": 0.9}, seeds=1)
    texts = said(results_of(base, setting("A", {"nll": 0.1}, seeds=1, against=base["title"], differences=apart)))
    assert texts == [
        "A is best on NLL.",
        "One seed: it says nothing about noise; another seed may order them otherwise.",
    ]
    alone = setting("A", {"accuracy": 0.75, "member_accuracy": 0.7}, seeds=1)
    assert said(results_of(alone))[0] == (
        "A with 5 members is right on 75.00 % of the test examples, 5.00 points more than its members on their own."
    )


def test_the_summary_says_when_there_is_nothing_to_compare_with():
    texts = said(results_of(setting("A", {"nll": 0.1}), setting("B", {"nll": 0.2})))
    assert texts[-1] == "There are no Deep Ensembles of the same seeds among the runs to compare with."


# ---- figures


def test_boxes_are_quartiles():
    values = [5.0, 1.0, 4.0, 2.5, 9.0, 3.0]
    assert box_of(values) == pytest.approx(np.percentile(values, [0, 25, 50, 75, 100]))
    assert box_of([2.0]) == (2.0,) * 5


def test_ticks_are_round_and_inside():
    assert ticks(0.13, 0.87, 4) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert ticks(-1, 1, 4) == pytest.approx([-1, -0.5, 0, 0.5, 1])
    assert nice_step(0.0213) == pytest.approx(0.025)


def test_elements_escape_what_they_hold():
    assert tag("text", '<b> & "', class_="a", x=1.25) == '<text class="a" x="1.2">&lt;b&gt; &amp; &#34;</text>'
    assert 'aria-label="&#34;&gt;"' in tag("svg", aria_label='">', role=None)


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    return make_evaluation(tmp_path_factory.mktemp("runs"), seeds=(0, 1))


@pytest.fixture(scope="module")
def settings(evaluation):
    return shown_settings(evaluation)


def entries(evaluation, method):
    return [entry for entry in evaluation.results["runs"] if entry["method"] == method]


def test_the_figures_say_their_numbers_aloud(evaluation, settings):
    names = ("fog", "shot_noise", "contrast")
    ours = entries(evaluation, "feature-WGD")
    values = [[e["corrupted"][name]["5"]["calibrated"]["nll"] for e in ours] for name in names]
    median = np.median(np.mean(values, axis=1))
    assert f"{median:.4g} at severity 5." in corruption_boxes(settings).panels[1]
    whole = np.mean([e["clean"]["by_size"]["3"]["accuracy"] for e in ours])
    assert f"{100 * whole:.4g} with 3." in by_size(settings).panels[0]
    ece = [np.mean([e["clean"][kind]["ece"] for e in ours]) for kind in ("raw", "calibrated")]
    assert f"feature-WGD: ECE raw → calibrated {ece[0]:.4f} → {ece[1]:.4f}." in reliability(settings).panels[1]


def test_ensembles_trained_in_several_sizes_have_a_figure(evaluation, settings):
    """Deep Ensembles that were not trained small are parts of the largest; settings that differ otherwise have none."""
    deep, ours = settings[:2]
    assert by_trained_size(settings) is None
    sizes = {1: 0.8, deep.members: 0.9}
    trained = [
        replace(
            ours,
            entry={**ours.entry, "members": members},
            measured=[
                {**e, "clean": {**e["clean"], "calibrated": {"accuracy": a, "nll": 1 - a}}} for e in ours.measured
            ],
        )
        for members, a in sizes.items()
    ]
    figure = by_trained_size([deep, *trained])
    label = re.search(r'aria-label="(Accuracy[^"]*)"', str(figure.panels[0]))[1]
    alone = 100 * mean([e["clean"]["by_size"]["1"]["accuracy"] for e in deep.measured]).mean
    whole = 100 * mean([e["clean"]["calibrated"]["accuracy"] for e in deep.measured]).mean
    assert f"Deep Ensembles {alone:.4g} with 1, {whole:.4g} with {deep.members}" in label
    assert f"feature-WGD 80 with 1, 90 with {deep.members}" in label
    other = replace(ours, entry={**ours.entry, "members": 1})
    assert by_trained_size([deep, ours, ours, other]) is None


def test_corruptions_are_compared_with_deep_ensembles(evaluation, settings):
    table = corruption_table(settings)
    assert [row[0].text for row in table.rows] == ["clean", "fog", "shot noise", "contrast"]
    means = [
        100
        * np.mean([e["corrupted"]["fog"][s]["calibrated"]["accuracy"] for e in entries(evaluation, m) for s in "15"])
        for m in ("Deep Ensembles", "feature-WGD")
    ]
    base, ours = table.rows[1][1:]
    assert (base.text, base.aside) == (f"{means[0]:.2f}", "")
    assert (ours.text, ours.aside) == (f"{means[1]:.2f}", fixed(means[1] - means[0], 2, sign=True))
    assert (ours.heat > 0) == (means[1] > means[0])


def test_detection_has_the_best_of_each_kind_of_input_in_bold(evaluation, settings):
    rows = detection_table(settings).rows
    fpr = [np.mean([e["unfamiliar"]["noise"]["entropy"]["fpr95"] for e in s.measured]) for s in settings]
    assert [row[8].text for row in rows] == [f"{100 * value:.1f}" for value in fpr]
    assert [row[8].best for row in rows] == [value == min(fpr) for value in fpr]


def test_the_most_disputed_pictures_come_first(evaluation, settings):
    predictions = [read(s.runs[0], evaluation.conditions[0]) for s in settings]
    score = torch.stack([mutual_information(p.log_probs.double().exp()) for p in predictions]).mean(0)
    found = disputes(evaluation, settings).pictures
    assert [one.position for one in found] == score.topk(8).indices.tolist()
    first, place = found[0], int(score.argmax())
    name = evaluation.results["class_names"][place % 4]
    assert first.alt == f"test picture {place}, {'an' if name == 'owl' else 'a'} {name}"
    members = predictions[1].log_probs[:, place].exp()
    said = [(m.name, m.probability) for m in first.opinions[1].members]
    names = evaluation.results["class_names"]
    assert said == [(names[int(p.argmax())], f"{100 * p.max():.0f}\u202f%") for p in members]


# ---- files


def test_the_files_are_written(evaluation, tmp_path):
    path = write_report(evaluation, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "report.html"
    pages = [p.name for p in path.parent.iterdir() if p.suffix not in (".svg", ".png")]
    assert sorted(pages) == ["report.html", "results.json", "table.md", "table.tex"]
    assert json.loads((path.parent / "results.json").read_text()) == json.loads(json.dumps(evaluation.results))
    assert "**" in (path.parent / "table.md").read_text()
    assert r"\toprule" in (path.parent / "table.tex").read_text()
    (tmp_path / "tables").mkdir()
    written = write_tables(evaluation, tmp_path / "tables")
    assert sorted(written) == sorted((tmp_path / "tables").iterdir())
    assert [p.name for p in written] == ["results.json", "table.md", "table.tex"]


def test_figures_stand_alone_with_their_legends(evaluation, settings, tmp_path):
    write_report(evaluation, tmp_path)
    texts = list(ElementTree.parse(tmp_path / "severity.svg").getroot().itertext())
    assert all(s.title in texts for s in settings)
    assert not (tmp_path / "sizes.svg").exists()  # all were trained with as many members
    assert (tmp_path / "map_similarity.svg").exists() == (tmp_path / "maps.png").exists() == bool(evaluation.mapped)


def test_a_folder_that_cannot_be_made_is_said_in_a_sentence(evaluation, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"results\.json could not be written .*; give another folder"):
        write_report(evaluation, tmp_path / "file")


SECTIONS = ("corruption", "size", "members", "looking", "disagreement", "certainty", "training")
NOTHING = {"corruptions": (), "unfamiliar": (), "maps": False}


@pytest.mark.parametrize(
    ("methods", "more", "missing"),
    [
        (TWO[:1], {"seeds": (0,)} | NOTHING, {"corruption", "looking"}),
        (
            [{"class": "Single"}],
            {"seeds": (0,)} | NOTHING,
            {"corruption", "looking", "size", "members", "disagreement"},
        ),
        ([{"class": "Single"}, *TWO], {"seeds": (0,), "corruptions": ("fog",)}, set()),
        (TWO, {"seeds": (0,), "pictures": False} | NOTHING, {"corruption", "looking"}),
        (TWO[1:], {"classes": 50, "names": ()} | NOTHING, {"corruption", "looking"}),
    ],
    ids=["one run", "one network", "with a single network", "no pictures", "no names"],
)
def test_sections_without_numbers_are_left_out(tmp_path, methods, more, missing):
    html = re.sub(r"base64,[^\"]*", "", page(make_evaluation(tmp_path, methods, **more)))
    assert {name for name in SECTIONS if f'<section id="{name}">' not in html} == missing
    assert not re.search(r">\s*(None|nan)\b|NaN|inf\b", html)
    assert html.count("<svg") >= 3
