"""Helpers for the whole package: atomic files, registries, JSON, provenance. Only provenance imports PyTorch."""
