"""Fixtures for unit tests."""

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_fsync():
    """Do not wait for the disk: no unit test cuts the power, and an fsync may take 10 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield
