"""Helpers for the whole package: atomic files, registries, JSON, provenance. Imports no PyTorch."""
