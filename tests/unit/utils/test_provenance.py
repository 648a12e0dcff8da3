"""Provenance of results."""

import json
import subprocess
import sys
from pathlib import Path

import torch

import featureflock as ff
from featureflock.utils import provenance as module
from featureflock.utils.provenance import provenance


def test_has_commit_versions_command_and_machine(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/featureflock/__main__.py", "train", "digits"])
    facts = provenance()
    assert facts["command"] == "python -m featureflock train digits"
    assert facts["versions"]["featureflock"] == ff.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["machine"]["cores"] >= 1
    assert facts["machine"]["processor"] is not None
    assert json.loads(json.dumps(facts)) == facts


def test_the_commit_is_that_of_the_checkout_and_marks_changes(monkeypatch):
    root = Path(ff.__file__).parents[1]
    if not (root / ".git").exists():
        assert module._commit() is None
        return
    outputs = iter(["abc\n", ""])
    seen = []

    def run(command, **_):
        seen.append(command)
        return subprocess.CompletedProcess(command, 0, stdout=next(outputs))

    monkeypatch.setattr(subprocess, "run", run)
    assert module._commit() == "abc"
    assert all(command[2] == str(root) for command in seen)
    outputs = iter(["abc\n", " M file\n"])
    assert module._commit() == "abc+"


def test_without_git_there_is_no_commit(monkeypatch):
    def fail(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", fail)
    assert module._commit() is None
