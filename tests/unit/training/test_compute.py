"""Compute options: the number of processes that would be faster than one."""

from dataclasses import replace

import pytest

from featureflock.distributed.mesh import MeshShape
from featureflock.training import ComputeConfig
from featureflock.training.compute import ResolvedCompute, faster_processes

COMPILED = ResolvedCompute("cpu", "float32", True, True, "sequential", threads=4)


@pytest.mark.parametrize(("members", "processes"), [(6, 2), (8, 4), (10, 2), (5, 1), (1, 1)])
def test_processes_divide_members_and_threads(members, processes):
    assert faster_processes(ComputeConfig(), COMPILED, members) == processes


@pytest.mark.parametrize("change", [{"compile": False}, {"channels_last": False}, {"device": "cuda"}], ids=str)
def test_one_process_where_more_are_not_faster(change):
    assert faster_processes(ComputeConfig(), replace(COMPILED, **change), 8) == 1


def test_no_suggestion_where_the_user_has_decided(monkeypatch):
    assert faster_processes(ComputeConfig(mesh=MeshShape(members=1)), COMPILED, 8) == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert faster_processes(ComputeConfig(), COMPILED, 8) == 1
