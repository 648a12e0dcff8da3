"""The summary in words: best values, and significant differences only."""

from helpers.result_groups import BASELINE, THREE, compared, group, results_of

from featureflock.reports.findings import findings, tiles


def texts(results):
    return [f"{finding.lead} {finding.text}".strip() for finding in findings(results)]


def test_the_summary_names_best_methods_and_significant_differences():
    assert texts(THREE) == [
        "By the means over seeds, Deep Ensembles and A & B_1 are equally best on accuracy; A & B_1 and C are equally "
        "best on NLL.",
        "A & B_1 vs Deep Ensembles, over 3 shared seeds: significantly better on NLL (−0.0100); no significant "
        "difference on accuracy.",
        "C vs Deep Ensembles, over 3 shared seeds: significantly worse on accuracy (−5.12 points); no significant "
        "difference on NLL.",
    ]
    assert [(tile["title"], tile["value"], tile["methods"]) for tile in tiles(THREE)] == [
        ("Accuracy", "90.12\u202f%", "Deep Ensembles and A & B_1"),
        ("NLL", "0.3000", "A & B_1 and C"),
    ]


def test_methods_without_a_significant_difference_share_a_sentence():
    metrics, alike = {"accuracy": 0.9, "nll": 0.3}, {"accuracy": (0.01, -0.01, 0.03), "nll": (0.0, None, None)}
    results = results_of(group(BASELINE, metrics), *(compared(title, metrics, alike) for title in ("A", "B")))
    assert "A and B vs Deep Ensembles, over 3 shared seeds: no significant difference on any metric." in texts(results)


def test_equal_differences_are_named_and_neither_significant_nor_absent():
    metrics, found = {"accuracy": 0.9, "nll": 0.3}, {"accuracy": (0.1, None, None), "nll": (1e-8, None, None)}
    (_, last) = texts(results_of(group(BASELINE, metrics), compared("A", metrics, found)))
    assert last.endswith(
        "the same difference on every seed, so not tested, on accuracy (+10.00 points); no significant difference on "
        "NLL."
    )


def test_two_seeds_are_too_few_to_call_a_difference_significant():
    apart = compared("A", {"nll": 0.1}, {"nll": (-1.0, -1.1, -0.9)}, seeds=2)
    (_, last) = texts(results_of(group(BASELINE, {"nll": 0.9}, seeds=2), apart))
    assert last == "A: fewer than 3 seeds shared with Deep Ensembles, too few to test for significance."


def test_one_seed_comes_with_a_warning():
    apart = compared("A", {"nll": 0.1}, {"nll": (-1.0, None, None)}, seeds=1)
    assert texts(results_of(group(BASELINE, {"nll": 0.9}, seeds=1), apart)) == [
        "A is best on NLL.",
        "One seed: another seed may give other values.",
    ]


def test_many_intervals_come_with_a_warning():
    difference = dict.fromkeys(("accuracy", "nll", "brier", "ece"), (1.0, -1.0, 2.0))
    others = [compared(title, dict.fromkeys(difference, 1.0), difference) for title in "ABC"]
    assert "Of 12 such intervals at 95 %, about one in twenty excludes 0 even if there is no difference." in texts(
        results_of(group(BASELINE, dict.fromkeys(difference, 1.0)), *others)
    )
