"""Helpers without PyTorch: atomic files, provenance, suggestions for mistyped names."""
