"""Figures, their labels, and tables by test set."""

import re
from dataclasses import replace

import numpy as np
import pytest
from helpers.made_evaluations import make_images, make_results

from featureflock.reports.figures import reliability_diagram, severity_boxes, sub_ensembles, trained_sizes
from featureflock.reports.images import cam_figure, disputed_images
from featureflock.reports.page import build_sections, render_page
from featureflock.reports.robustness_tables import corruption_table, ood_table
from featureflock.reports.rows import report_rows
from featureflock.reports.svg import tag, ticks


def test_ticks_are_round_numbers_within_the_range():
    assert ticks(0.13, 0.87, 4) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert ticks(-1, 1, 4) == pytest.approx([-1, -0.5, 0, 0.5, 1])
    assert ticks(0, 0.09, 4) == pytest.approx([0, 0.025, 0.05, 0.075])


def test_elements_escape_their_content():
    assert tag("text", '<b> & "', class_="a", x=1.25) == '<text class="a" x="1.2">&lt;b&gt; &amp; &#34;</text>'
    assert 'aria-label="&#34;&gt;"' in tag("svg", aria_label='">')


@pytest.fixture(scope="module")
def results():
    return make_results(seeds=(0, 1))


@pytest.fixture(scope="module")
def rows(results):
    return report_rows(results)


def test_labels_of_figures_state_the_numbers(rows):
    runs = rows[1].runs
    nll = [[run.corrupted[name]["5"].calibrated["nll"] for run in runs] for name in ("fog", "shot_noise", "contrast")]
    low, middle, high = sorted(np.mean(nll, axis=1))
    boxes = severity_boxes(rows).panels[1].svg
    assert f"{middle:.4g} at severity 5." in boxes
    quartiles = (
        f"lower quartile {(low + middle) / 2:.4g}, median {middle:.4g}, upper quartile {(middle + high) / 2:.4g}"
    )
    assert f"feature-WGD, 5: minimum {low:.4g}, {quartiles}, maximum {high:.4g}" in boxes
    accuracy = np.mean([run.details.by_size["3"]["accuracy"] for run in runs])
    assert f"{100 * accuracy:.4g} with 3." in sub_ensembles(rows).panels[0].svg
    ece = [np.mean([getattr(run.clean, kind)["ece"] for run in runs]) for kind in ("raw", "calibrated")]
    assert f"feature-WGD: ECE raw → calibrated {ece[0]:.4f} → {ece[1]:.4f}." in reliability_diagram(rows).panels[1].svg


def test_reliability_pools_the_seeds(rows):
    """Tooltips of the last bin: number of examples of all runs, and their accuracy."""
    for panel, row in zip(reliability_diagram(rows).panels, rows, strict=True):
        curves = [run.details.reliability["calibrated"] for run in row.runs]
        counts, accuracies = [curve.count[14] for curve in curves], [curve.accuracy[14] for curve in curves]
        assert f"<title>{sum(counts):g} examples</title>" in panel.svg
        accuracy = 100 * np.average(accuracies, weights=counts)
        assert f" % confident, {accuracy:.1f} % correct, {sum(counts):g} examples</title>" in panel.svg


def test_ensembles_trained_in_several_sizes_have_a_figure(rows):
    """Sizes of Deep Ensembles that were not trained are subsets of the largest; otherwise rows must differ in size."""
    deep, ours = rows
    assert trained_sizes(rows) is None

    def trained(members, accuracy):
        scores = {"accuracy": accuracy, "nll": 1 - accuracy}
        runs = [replace(run, clean=replace(run.clean, calibrated=scores)) for run in ours.runs]
        return replace(ours, group=replace(ours.group, members=members), runs=runs)

    figure = trained_sizes([deep, trained(1, 0.8), trained(3, 0.9)])
    label = re.search(r'aria-label="(Accuracy[^"]*)"', figure.panels[0].svg)[1]
    subset = 100 * np.mean([run.details.by_size["1"]["accuracy"] for run in deep.runs])
    largest = 100 * np.mean([run.clean.calibrated["accuracy"] for run in deep.runs])
    assert f"Deep Ensembles {subset:.4g} with 1, {largest:.4g} with 3" in label
    assert "feature-WGD 80 with 1, 90 with 3" in label
    assert trained_sizes([deep, ours, ours, trained(1, 0.8)]) is None


def test_corruptions_are_compared_with_deep_ensembles(rows):
    table = corruption_table(rows)
    assert [row[0].text for row in table.rows] == ["clean", "fog", "shot noise", "contrast"]
    base, ours = (
        100 * np.mean([run.corrupted["fog"][s].calibrated["accuracy"] for run in row.runs for s in "15"])
        for row in rows
    )
    first, second = table.rows[1][1:]
    assert (first.text, first.detail) == (f"{base:.2f}", "")
    assert (second.text, second.detail) == (f"{ours:.2f}", f"{ours - base:+.2f}".replace("-", "−"))
    assert (second.heat > 0) == (ours > base)


def test_the_best_detection_of_each_ood_set_is_marked(rows):
    table = ood_table(rows)
    fpr = [np.mean([run.ood["noise"]["entropy"]["fpr95"] for run in row.runs]) for row in rows]
    assert [row[8].text for row in table.rows] == [f"{100 * value:.1f}" for value in fpr]
    assert [row[8].best for row in table.rows] == [value == min(fpr) for value in fpr]


def test_disputed_examples_show_each_members_prediction(results, rows):
    images = make_images(results)
    clean, corrupted, ood = disputed_images(results, images, rows)
    assert [block.title for block in (clean, corrupted, ood)] == ["Clean test set", "Corrupted test sets", "OOD sets"]
    found = clean.examples
    assert [example.position for example in found] == [10, 11, 12, 13]
    example, shown = results.disputed[2], found[2]
    assert shown.alt == "test image 12, an owl"
    assert shown.width == 112  # 8 pixels, enlarged 14 times
    (_, (row, members)) = shown.predictions
    expected = [
        (results.class_names[k], f"{100 * p:.0f}\u202f%", k == 2) for k, p in example.predictions["feature-WGD"]
    ]
    assert (row.title, members) == ("feature-WGD", expected)
    assert corrupted.examples[1].place == "fog, severity 5; test example 11"
    assert corrupted.examples[1].alt == "test image 11, a dog, with fog, severity 5"
    assert (ood.examples[0].label, ood.examples[0].alt) == ("noise", "OOD input 10 of noise")
    html = render_page(results, build_sections(results, images))
    assert html.index('id="disputed-clean"') < html.index('id="disputed-corrupted"') < html.index('id="disputed-ood"')
    labelled = [example for example in results.disputed if example.label is not None]
    votes = [(example.label, members) for example in labelled for members in example.predictions.values()]
    correct = [str(sum(k == label for k, _ in members)) for label, members in votes]
    assert re.findall(r"(\d) of 3 correct", html) == correct


def test_class_activation_maps_have_an_alternative_text(results, rows):
    alt = cam_figure(results, make_images(results), rows).alt
    assert alt == (
        "Class activation maps of Deep Ensembles (seed 0) and feature-WGD (seed 0), over images of a cat, a dog and an "
        "owl."
    )
