"""Compute options: what `auto` chooses, and the number of processes that would be faster than one."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from featureflock.core.layer import ParticleLayer
from featureflock.distributed.mesh import MeshShape
from featureflock.ensemble import Ensemble
from featureflock.training import ComputeConfig
from featureflock.training.compute import ResolvedCompute, faster_processes, resolve_compute

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


@pytest.mark.parametrize(
    ("device", "precision", "compile", "compiled"),
    [
        ("cpu", "float32", "auto", True),
        ("cpu", "auto", "auto", True),
        ("cpu", "bfloat16", "auto", False),
        ("cpu", "bfloat16", "on", True),
        ("cpu", "float32", "off", False),
        ("meta", "bfloat16", "auto", True),
    ],
)
def test_long_runs_are_compiled_but_not_in_bfloat16_on_a_cpu(monkeypatch, device, precision, compile, compiled):
    monkeypatch.setattr("featureflock.training.compute.compiler_problem", lambda device: None)
    monkeypatch.setattr("featureflock.training.compute.resolve_device", torch.device)  # which refuses meta
    monkeypatch.setattr("featureflock.training.compute._COMPILE_FLOPS", {"cpu": 1e9, "meta": 1e9})
    ens = Ensemble([nn.Linear(2, 2)], nn.Linear(2, 2), ParticleLayer())
    config = ComputeConfig(device=device, compile=compile)
    assert resolve_compute(config, precision, ens, lambda: 1e10).compile is compiled
    assert resolve_compute(config, precision, ens, lambda: 1e8).compile is (compile == "on")


def test_a_compiler_that_does_not_work_is_reported_or_refused(monkeypatch):
    monkeypatch.setattr("featureflock.training.compute.compiler_problem", lambda device: "g++ did not finish")
    monkeypatch.setattr("featureflock.training.compute._COMPILE_FLOPS", {"cpu": 1e9})
    ens, notes = Ensemble([nn.Linear(2, 2)], nn.Linear(2, 2), ParticleLayer()), []
    assert not resolve_compute(ComputeConfig(), "float32", ens, lambda: 1e10, notes.append).compile
    assert notes == ["Computing without compilation, because g++ did not finish."]
    assert not resolve_compute(ComputeConfig(), "float32", ens, lambda: 1e8, notes.append).compile
    assert len(notes) == 1  # a short run would not be compiled anyway
    message = "--compile on does not work here, because g\\+\\+ did not finish; leave it out"
    with pytest.raises(ValueError, match=message):
        resolve_compute(ComputeConfig(compile="on"), "float32", ens, lambda: 1e8)
