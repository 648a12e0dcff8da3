"""Similarity of the members' class activation maps. The paper plots it and prints no numbers."""

from featureflock.studies.severity import on_three_data_sets
from featureflock.studies.study import STUDIES, Study

_TITLE = "Similarity of the members' class activation maps, clean and corrupted"
_COLUMNS = ("map_similarity", "corrupted_map_similarity")
STUDIES.add("cam-similarity", Study(_TITLE, on_three_data_sets(), _COLUMNS, seeds=3, source="Figure 3"))
