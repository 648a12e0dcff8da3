"""Metrics as pure functions, and the registry that summaries, tables, `tune` and studies read."""
