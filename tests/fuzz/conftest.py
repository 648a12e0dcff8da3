"""Fixtures for fuzzing."""

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_fsync():
    """Do not wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield
