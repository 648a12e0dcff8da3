"""The verdict in one sentence: every outcome, exactly."""

from dataclasses import replace

import pytest
from helpers.result_groups import BASELINE, compared, group, results_of

from featureflock.evaluation.statistics import PairedDifference
from featureflock.reports.verdict import main_group, verdict

NAMES = ("accuracy", "nll", "brier", "ece")
PAPER = (*NAMES, *(f"corrupted_{name}" for name in NAMES))
METRICS = dict.fromkeys(PAPER, 0.5)
UP, DOWN = (0.01, 0.008, 0.012), (-0.01, -0.012, -0.008)
BETTER = {"accuracy": UP, "nll": DOWN, "brier": DOWN, "ece": DOWN}
WORSE = {"accuracy": DOWN, "nll": UP, "brier": UP, "ece": UP}
EQUAL = dict.fromkeys(NAMES, (0.0002, -0.0005, 0.0009))
"""No significant difference, and a loss of accuracy of 0.1 points is excluded."""
UNDECIDED = dict.fromkeys(NAMES, (0.0, -0.02, 0.02))


def results(clean, corrupted=None, seeds=5, title="feature-WGD"):
    """One method with these differences; without corrupted test sets if there are none for them."""
    differences = clean | {f"corrupted_{key}": value for key, value in (corrupted or {}).items()}
    metrics = dict.fromkeys(differences, 0.5)
    return results_of(group(BASELINE, metrics, seeds=seeds), compared(title, metrics, differences, seeds=seeds))


CASES = {
    "better everywhere": (
        results(BETTER, BETTER),
        "Over 5 seeds, feature-WGD is more accurate, better calibrated and better in NLL and Brier score than Deep "
        "Ensembles on clean and corrupted images.",
    ),
    "worse everywhere": (
        results(WORSE, WORSE),
        "Over 5 seeds, feature-WGD is less accurate, worse calibrated and worse in NLL and Brier score than Deep "
        "Ensembles on clean and corrupted images.",
    ),
    "better calibrated on corrupted images, and as accurate": (
        results(UNDECIDED, {"accuracy": EQUAL["accuracy"], "ece": DOWN}),
        "Over 5 seeds, feature-WGD is better calibrated than Deep Ensembles on corrupted images, and as accurate; on "
        "clean images it shows no significant difference in accuracy, NLL, Brier score or ECE.",
    ),
    "both": (
        results(EQUAL | {"nll": DOWN}, BETTER | {"ece": UP, "brier": UNDECIDED["brier"]}),
        "Over 5 seeds, feature-WGD is better in NLL than Deep Ensembles on clean images, and as accurate, with no "
        "significant difference in Brier score or ECE; on corrupted images it is more accurate and better in NLL but "
        "worse calibrated, with no significant difference in Brier score.",
    ),
    "no significant difference": (
        results(UNDECIDED, UNDECIDED),
        "Over 5 seeds, feature-WGD shows no significant difference from Deep Ensembles in accuracy, NLL, Brier score "
        "or ECE on clean and corrupted images.",
    ),
    "as accurate and no more": (
        results(EQUAL, UNDECIDED),
        "Over 5 seeds, feature-WGD is as accurate as Deep Ensembles on clean images, with no significant difference in "
        "NLL, Brier score or ECE; on corrupted images it shows no significant difference in accuracy, NLL, Brier score "
        "or ECE.",
    ),
    "a margin that is not excluded is not called as accurate": (
        results({"accuracy": (0.0, -0.0011, 0.0011), "nll": DOWN}),
        "Over 5 seeds, feature-WGD is better in NLL than Deep Ensembles on the clean test set, with no significant "
        "difference in accuracy.",
    ),
    "a small but significant loss is a loss": (
        results({"accuracy": (-0.0002, -0.0003, -0.0001), "nll": DOWN}),
        "Over 5 seeds, feature-WGD is better in NLL but less accurate than Deep Ensembles on the clean test set.",
    ),
    "clean only": (
        results(BETTER, seeds=3),
        "Over 3 seeds, feature-WGD is more accurate, better calibrated and better in NLL and Brier score than Deep "
        "Ensembles on the clean test set.",
    ),
    "two seeds": (
        results(BETTER, BETTER, seeds=2),
        "feature-WGD and Deep Ensembles share 2 seeds on clean and corrupted images, fewer than the 3 that a "
        "test of significance needs.",
    ),
    "one seed": (
        results({"nll": (-1.0, None, None)}, seeds=1),
        "feature-WGD and Deep Ensembles share 1 seed on the clean test set, fewer than the 3 that a test of "
        "significance needs.",
    ),
    "the same predictions": (
        results(dict.fromkeys(NAMES, (0.0, None, None))),
        "Over 5 seeds, feature-WGD has the same accuracy, NLL, Brier score and ECE as Deep Ensembles on every seed, on "
        "the clean test set.",
    ),
    "the same difference on every seed": (
        results({"accuracy": (0.1, None, None)}, {"accuracy": (0.0, None, None), "nll": DOWN}),
        "Over 5 seeds, feature-WGD is better in NLL than Deep Ensembles on corrupted images, with the same accuracy on "
        "every seed; on clean images it differs in accuracy equally on every seed, which is not tested.",
    ),
    "a comma in the title": (
        results({"nll": DOWN}, title="feature-WGD, tuned"),
        "Over 5 seeds, feature-WGD (tuned) is better in NLL than Deep Ensembles on the clean test set.",
    ),
    "no endpoint": (
        results({"disagreement": UP}),
        "feature-WGD and Deep Ensembles have no endpoint in common, so there is no verdict.",
    ),
    "no baseline": (
        results_of(group("A", {"nll": 0.1}), group("B", {"nll": 0.2})),
        "No method is compared with another, because none shares a seed with Deep Ensembles.",
    ),
    "one method": (
        results_of(group("A", {"accuracy": 0.75, "member_accuracy": 0.7}, seeds=4)),
        "Over 4 seeds, A with 5 members classifies 75.00 % of the test examples correctly, 5.00 points more than its "
        "members on average.",
    ),
    "one network": (
        results_of(group("Single", {"accuracy": 0.75, "member_accuracy": 0.75}, seeds=1, members=1)),
        "Single, a single network, classifies 75.00 % of the test examples correctly.",
    ),
    "one regression": (
        replace(results_of(group("A", {"rmse": 0.5, "member_rmse": 0.6})), task="regression"),
        "Over 3 seeds, A with 5 members has RMSE 0.5000 on the test set; its members have 0.6000 on average.",
    ),
    "regression": (
        replace(
            results({"rmse": DOWN, "nll": (0.0, -0.1, 0.1), "crps": DOWN, "calibration_error": UP}), task="regression"
        ),
        "Over 5 seeds, feature-WGD is better in RMSE and CRPS but worse calibrated than Deep Ensembles on the clean "
        "test set, with no significant difference in NLL.",
    ),
    "several labels": (
        replace(
            results({"mean_average_precision": UP, "label_accuracy": UP, "nll": DOWN, "label_ece": DOWN}),
            task="multi-label",
        ),
        "Over 5 seeds, feature-WGD is more accurate, better calibrated and better in mAP and NLL than Deep Ensembles "
        "on the clean test set.",
    ),
}


@pytest.mark.parametrize(("given", "sentence"), CASES.values(), ids=CASES)
def test_sentence(given, sentence):
    assert verdict(given).sentence == sentence


def corrected(*p_values):
    """Four endpoints whose intervals exclude 0, with these p-values."""
    found = {key: PairedDifference(*BETTER[key], 5, p) for key, p in zip(NAMES, p_values, strict=True)}
    row = group("A", METRICS, seeds=5, baseline=BASELINE, differences=found)
    return results_of(group(BASELINE, METRICS, seeds=5), row)


def test_endpoints_are_corrected_for_one_another():
    """0.03 is significant by itself, and not as the largest of the last two: 2 × 0.03 > 0.05."""
    found = verdict(corrected(0.03, 0.001, 0.001, 0.03))
    assert found.sentence == (
        "Over 5 seeds, A is better in NLL and Brier score than Deep Ensembles on the clean test set, and as accurate, "
        "with no significant difference in ECE."
    )
    assert found.basis == (
        "Paired by seed; significant by p < 0.05 after Holm’s correction for 4 endpoints. Without the correction, "
        "Accuracy and ECE would be significantly better. As accurate: the 95 % interval excludes a loss of more than "
        "0.1 points."
    )


def test_a_loss_that_only_the_correction_hides_is_reported():
    found = corrected(0.03, 0.001, 0.001, 0.03)
    row = found.groups[1]
    worse = row.differences["ece"]._replace(mean=0.02, low=0.01, high=0.03)
    row.differences["ece"] = worse
    assert "Without the correction, ECE would be significantly worse. Without" in verdict(found).basis


def test_only_declared_endpoints_count():
    declared = replace(corrected(0.03, 0.001, 0.001, 0.03), endpoints=["ece"])
    assert verdict(declared).sentence == (
        "Over 5 seeds, A is better calibrated than Deep Ensembles on the clean test set."
    )


def test_what_weakens_the_verdict_is_listed():
    first = compared("A", METRICS, {"nll": DOWN}, members=10, baseline_differs_in=["epochs"], temperature_at_bound=True)
    baseline = group(BASELINE, METRICS, corrupted_temperature_at_bound=True)
    assert verdict(results_of(baseline, first, compared("B", METRICS, {"nll": DOWN}))).basis == (
        "Paired by seed; significant by 95 % intervals. The ensembles have 10 and 5 members. The recipes differ in "
        "more than the method: epochs. A fitted temperature is at its bound, so the calibrated clean and corrupted "
        "scores are not reliable. The other methods are in the figure and the tables below."
    )


@pytest.mark.parametrize(
    ("titles", "main"),
    [
        (["feature-WGD, tuned", "feature-WGD, τ = 1", "feature-MAP"], "feature-WGD, tuned"),
        (["feature-WGD, paper", "feature-WGD, τ = 8", "feature-MAP"], "feature-WGD, τ = 8"),
        (["Single", "mine", "other"], "mine"),
        (["Single"], "Single"),
    ],
)
def test_the_main_method_is_chosen_by_name_and_place(titles, main):
    rows = [compared(title, METRICS, {"nll": DOWN}, members=1 if title == "Single" else 5) for title in titles]
    assert main_group(results_of(group(BASELINE, METRICS), *rows)).title == main
