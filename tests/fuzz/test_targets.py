"""A few random cases of each target, the same ones each time. `make fuzz` tries others."""

import pytest

from fuzz import api, readers  # noqa: F401 — registers the targets
from fuzz.attempts import COUNTS, TARGETS, fuzz

EXAMPLES = {"losses of all methods": 40, "predictions": 30, "metrics": 80, "images": 40, "evaluate and calibrate": 20}


@pytest.mark.parametrize("title", TARGETS)
def test_every_case_is_a_result_or_a_sentence(title):
    fuzz(title, EXAMPLES.get(title, 25))
    assert sum(COUNTS[title].values()) > 10
