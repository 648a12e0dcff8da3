"""Saved ensembles and other processes: the same bits, classes to import, and a process killed while it saves."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import featureflock as ff


class UserDefined(nn.Linear):
    """A class that other programs do not import."""


def python(script: str, *words) -> str:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def test_another_process_gets_the_same_bits_and_must_import_user_defined_classes(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(5, 32)
    ens = ff.Ensemble([nn.Sequential(nn.Linear(32, 6), nn.ReLU()) for _ in range(3)], nn.Linear(6, 3))
    ff.save(ens, tmp_path / "ens")
    ff.save(ff.Ensemble([UserDefined(32, 6)], nn.Linear(6, 3)), tmp_path / "user-defined")
    torch.save((x, ens.predict(x)), tmp_path / "io.pt")
    script = """
        import sys, torch, featureflock as ff
        x, p = torch.load(sys.argv[2])
        assert torch.equal(ff.load(sys.argv[1]).predict(x), p)
        try:
            ff.load(sys.argv[3])
        except ValueError as error:
            print(error)
    """
    message = python(script, tmp_path / "ens", tmp_path / "io.pt", tmp_path / "user-defined")
    assert "UserDefined, which this program has not imported; import it first (commands import the modules" in message


def test_killed_while_saving(tmp_path):
    """A real SIGKILL in an endless series of saves: a complete ensemble is left."""
    script = """
        import sys, torch, featureflock as ff
        from torch import nn
        ens = ff.Ensemble([nn.Linear(64, 64) for _ in range(3)], nn.Linear(64, 2))
        k = 0
        while True:
            with torch.no_grad():
                for p in ens.parameters(): p.fill_(k)
            ff.save(ens, sys.argv[1])
            k += 1
            if k == 3: print("started", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "started\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.013)
        process.kill()
    values = {float(p.detach().flatten()[0]) for p in ff.load(tmp_path).parameters()}
    assert len(values) == 1
