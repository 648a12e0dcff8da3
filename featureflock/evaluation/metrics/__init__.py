"""Metrics as pure functions, and the registry that summaries, tables, `tune` and studies read."""

from featureflock.evaluation.metrics import entries as _built_in  # noqa: F401 — registers the built-in metrics
