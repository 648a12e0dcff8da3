"""Compute options: what `auto` chooses, and the number of processes that would be faster than one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from featureflock.core.layer import ParticleLayer
from featureflock.cpu_kernels import bfloat16
from featureflock.distributed.shape import MeshShape
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
    ens = Ensemble([nn.Conv1d(2, 2, 1)], nn.Linear(2, 2), ParticleLayer())
    config = ComputeConfig(device=device, compile=compile)
    assert resolve_compute(config, precision, ens, lambda: 1e10).compile is compiled
    assert resolve_compute(config, precision, ens, lambda: 1e8).compile is (compile == "on")


@pytest.mark.parametrize(
    ("device", "compile", "compiled"), [("cpu", "auto", False), ("cpu", "on", True), ("meta", "auto", True)]
)
def test_linear_layers_are_not_compiled_on_a_cpu(monkeypatch, device, compile, compiled):
    monkeypatch.setattr("featureflock.training.compute.compiler_problem", lambda device: None)
    monkeypatch.setattr("featureflock.training.compute.resolve_device", torch.device)
    monkeypatch.setattr("featureflock.training.compute._COMPILE_FLOPS", {"cpu": 1e9, "meta": 1e9})
    ens = Ensemble([nn.Sequential(nn.Flatten(), nn.Linear(2, 2), nn.ReLU())], nn.Linear(2, 2), ParticleLayer())
    assert (
        resolve_compute(ComputeConfig(device=device, compile=compile), "float32", ens, lambda: 1e10).compile is compiled
    )


def test_a_compiler_that_does_not_work_is_reported_or_refused(monkeypatch):
    monkeypatch.setattr("featureflock.training.compute.compiler_problem", lambda device: "g++ did not finish")
    monkeypatch.setattr("featureflock.training.compute._COMPILE_FLOPS", {"cpu": 1e9})
    ens, notes = Ensemble([nn.Conv1d(2, 2, 1)], nn.Linear(2, 2), ParticleLayer()), []
    assert not resolve_compute(ComputeConfig(), "float32", ens, lambda: 1e10, notes.append).compile
    assert notes == ["Computing without compilation, because g++ did not finish."]
    assert not resolve_compute(ComputeConfig(), "float32", ens, lambda: 1e8, notes.append).compile
    assert len(notes) == 1  # a short run would not be compiled anyway
    message = "--compile on does not work here, because g\\+\\+ did not finish; leave it out"
    with pytest.raises(ValueError, match=message):
        resolve_compute(ComputeConfig(compile="on"), "float32", ens, lambda: 1e8)


@pytest.fixture
def bfloat16_processor(monkeypatch):
    """A processor with instructions for bfloat16, on which convolutions are 1.9 times as fast."""
    monkeypatch.setattr("featureflock.training.compute.has_bfloat16", lambda: True)
    monkeypatch.setattr("featureflock.training.compute.bfloat16_speedup", lambda: 1.94)
    monkeypatch.setattr("featureflock.training.compute._COMPILE_FLOPS", {"cpu": 1e9})


def convolutional():
    return Ensemble([nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.LazyLinear(2))], nn.Linear(2, 2))


def test_auto_takes_bfloat16_for_long_training_of_convolutions_where_it_is_faster(bfloat16_processor, monkeypatch):
    notes = []
    resolved = resolve_compute(ComputeConfig(), "auto", convolutional(), lambda: 1e10, notes.append)
    assert resolved.precision == "bfloat16"
    assert not resolved.compile
    assert notes == ["Using bfloat16: convolutions are 1.9 times as fast as in float32 on this processor."]
    assert resolve_compute(ComputeConfig(), "float32", convolutional(), lambda: 1e10).precision == "float32"
    assert resolve_compute(ComputeConfig(), "auto", convolutional(), lambda: 1e8).precision == "float32"
    mlp = Ensemble([nn.Linear(2, 2)], nn.Linear(2, 2))
    assert resolve_compute(ComputeConfig(compile="off"), "auto", mlp, lambda: 1e10).precision == "float32"


@pytest.mark.parametrize(("name", "value"), [("has_bfloat16", False), ("bfloat16_speedup", 1.1)])
def test_auto_stays_with_float32_where_bfloat16_is_not_faster(bfloat16_processor, monkeypatch, name, value):
    monkeypatch.setattr(f"featureflock.training.compute.{name}", lambda: value)
    resolved = resolve_compute(ComputeConfig(compile="off"), "auto", convolutional(), lambda: 1e10)
    assert resolved.precision == "float32"


def test_instructions_are_read_from_the_system(monkeypatch, tmp_path):
    for flags, expected in (("fpu avx512f avx512_bf16", True), ("fpu avx2", False), ("fp asimd bf16", True)):
        key = "Features" if "asimd" in flags else "flags"
        monkeypatch.setattr(Path, "read_text", lambda self, key=key, flags=flags: f"processor : 0\n{key} : {flags}\n")
        assert bfloat16.has_bfloat16() is expected


def test_speed_of_bfloat16_does_not_touch_the_random_state():
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    bfloat16.bfloat16_speedup.cache_clear()
    with torch.no_grad():
        assert bfloat16.bfloat16_speedup() > 0
    assert torch.equal(torch.randn(3), expected)


@pytest.mark.parametrize(
    ("config", "problem", "used"),
    [
        (ComputeConfig(compile="on"), None, True),
        (ComputeConfig(compile="on"), "no C compiler can compile them", False),
        (ComputeConfig(compile="on", cpu_kernels="off"), None, False),
        (ComputeConfig(compile="off"), None, False),
        (ComputeConfig(compile="on", channels_last="off"), None, False),
    ],
)
def test_cpu_kernels_are_used_where_they_apply(monkeypatch, config, problem, used):
    monkeypatch.setattr("featureflock.training.compute.compiler_problem", lambda device: None)
    monkeypatch.setattr("featureflock.training.compute.kernels_problem", lambda: problem)
    notes = []
    resolved = resolve_compute(config, "float32", convolutional(), lambda: 1e10, notes.append)
    assert resolved.cpu_kernels is used
    assert notes == []  # skipped silently


def test_cpu_kernels_that_cannot_be_used_are_refused(monkeypatch):
    monkeypatch.setattr("featureflock.training.compute.compiler_problem", lambda device: None)
    monkeypatch.setattr("featureflock.training.compute.kernels_problem", lambda: "no C compiler can compile them")
    with pytest.raises(ValueError, match="--cpu-kernels on needs --compile on"):
        resolve_compute(ComputeConfig(cpu_kernels="on", compile="off"), "float32", convolutional(), lambda: 0.0)
    message = "--cpu-kernels on does not work here, because no C compiler can compile them; leave it out"
    with pytest.raises(ValueError, match=message):
        resolve_compute(ComputeConfig(cpu_kernels="on", compile="on"), "float32", convolutional(), lambda: 0.0)
