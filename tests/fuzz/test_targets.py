"""A few random cases of each target, the same ones each time. `make fuzz` tries others."""

import pytest

from fuzz import api, readers  # noqa: F401 — registers the targets
from fuzz.attempts import COUNTS, TARGETS, fuzz

EXAMPLES = {"resuming a run": 4, "reports from results.json": 8, "evaluate and calibrate": 8, "metrics": 60}
"""Number of cases, if it is not 20."""


@pytest.mark.parametrize("title", TARGETS)
def test_every_case_is_a_result_or_a_sentence(title):
    fuzz(title, EXAMPLES.get(title, 20))
    assert COUNTS[title].total() >= EXAMPLES.get(title, 20)
