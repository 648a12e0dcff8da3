"""Compilation is an optimisation: where the compiler does not work, training and prediction go on without it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.short_runs import CONVOLUTIONS, RecordingReporter, same, weights
from torch import nn
from torch.testing import assert_close

import featureflock as ff
from featureflock.ensemble import compilation
from featureflock.models.wide_resnet import WideResNet
from featureflock.training import ComputeConfig, train

pytestmark = pytest.mark.skipif(os.name == "nt", reason="The compilers here are shell scripts.")

# Answers what PyTorch asks, compiles the probe, and fails for all else.
FAILS_LATER = """#!/bin/sh
case "$*" in
  --version|-v|*probe*) exec g++ "$@" ;;
esac
echo "fatal error: disk quota exceeded" >&2
exit 1
"""
TRAIN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from helpers.short_runs import CONVOLUTIONS, RecordingReporter, same, weights
from featureflock.training import ComputeConfig, compute, train
compute._COMPILE_FLOPS = {"cpu": 0.0}
folder = Path(sys.argv[2])
reporter = RecordingReporter()
train(CONVOLUTIONS, folder / "auto", reporter=reporter)
print("\\n".join(reporter.notes))
train(CONVOLUTIONS, folder / "off", compute=ComputeConfig(compile="off"))
assert same(weights(folder / "auto"), weights(folder / "off"))
try:
    train(CONVOLUTIONS, folder / "on", compute=ComputeConfig(compile="on"))
except ValueError as error:
    print("REFUSED", error)
"""


def environment(tmp_path, **changes):
    """Environment variables of a process with its own temporary files and cache."""
    (tmp_path / "temporary").mkdir(exist_ok=True)
    base = {k: v for k, v in os.environ.items() if k not in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CXX")}
    variables = {"XDG_CACHE_HOME": tmp_path / "cache", "TMPDIR": tmp_path / "temporary"} | changes
    return base | {name: str(value) for name, value in variables.items()}


def predictable_files(tmp_path):
    return [path for path in (tmp_path / "temporary").rglob("torchinductor_*/**/*") if path.is_file()]


def test_a_compiler_that_fails_in_the_first_step(tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text(FAILS_LATER)
    compiler.chmod(0o755)
    command = [sys.executable, "-c", TRAIN, str(Path(__file__).parents[1]), str(tmp_path)]
    env = environment(tmp_path, CXX=compiler)
    run = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    reported = [line for line in lines if line.startswith("Computing without")]
    assert len(reported) == 1
    assert "because torch.compile failed: " in reported[0]
    assert "disk quota exceeded" in reported[0]
    assert lines[-1].startswith("REFUSED torch.compile failed: ")
    assert lines[-1].endswith("Use compile=False, or --compile off.")
    assert predictable_files(tmp_path) == []


def test_a_cache_folder_without_permission_to_execute(tmp_path):
    (tmp_path / "cache").mkdir()
    mount = f'mount -t tmpfs -o noexec tmpfs {tmp_path / "cache"} && exec "$@"'
    namespace = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if not shutil.which("unshare") or subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("File systems cannot be mounted here.")
    code = "from featureflock.cpu_kernels.compiler import compiler_problem; print(compiler_problem('cpu'))"
    env = environment(tmp_path, XDG_CACHE_HOME=tmp_path / "cache")
    run = subprocess.run([*namespace, sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert "cannot be executed in" in run.stdout
    assert "failed to map segment" in run.stdout
    env = environment(tmp_path, TMPDIR=tmp_path / "cache", XDG_CACHE_HOME=tmp_path / "other")
    run = subprocess.run([*namespace, sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert run.stdout == "None\n"  # temporary files need no such permission


@pytest.fixture
def failing(monkeypatch):
    """A backend that always fails, and fresh graphs."""
    import torch._inductor.compile_fx as inductor

    def fail(*args, **kwargs):
        raise OSError("invalid ELF header\nmore lines")

    torch._dynamo.reset()
    monkeypatch.setattr(inductor, "compile_fx", fail)
    yield
    torch._dynamo.reset()


def test_training_that_cannot_be_compiled_is_training_without(tmp_path, failing, monkeypatch):
    monkeypatch.setattr("featureflock.training.compute._COMPILE_FLOPS", {"cpu": 0.0})
    reporter = RecordingReporter()
    train(CONVOLUTIONS, tmp_path / "auto", reporter=reporter)
    sentence = "Computing without compilation, because torch.compile failed: OSError: invalid ELF header."
    assert reporter.notes.count(sentence) == 1
    train(CONVOLUTIONS, tmp_path / "off", compute=ComputeConfig(compile="off"))
    assert same(weights(tmp_path / "auto"), weights(tmp_path / "off"))
    with pytest.raises(ValueError, match=r"torch.compile failed: OSError: invalid ELF header\. Use compile=False"):
        train(CONVOLUTIONS, tmp_path / "on", compute=ComputeConfig(compile="on"))
    assert not (tmp_path / "on" / "result.json").exists()


def test_prediction_that_cannot_be_compiled(failing):
    torch.manual_seed(0)
    ens = ff.Ensemble([WideResNet(10, 1) for _ in range(2)], nn.Linear(64, 3))
    x = torch.randn(5, 3, 16, 16)
    fast = ens.for_inference()
    with pytest.warns(UserWarning, match="Computing without compilation, because torch.compile failed: OSError"):
        first = fast.predict(x)
    assert_close(first, ens.predict(x), rtol=0, atol=1e-5)
    assert_close(fast.predict(x), first)  # without another warning, which would be an error
    with pytest.raises(ValueError, match="Use compile=False"):
        ens.for_inference(compile=True).predict(x)


def test_prediction_with_a_broken_compiler(monkeypatch):
    monkeypatch.setattr("featureflock.ensemble.inference.compiler_problem", lambda device: "g++ did not finish")
    ens = ff.Ensemble([WideResNet(10, 1)], nn.Linear(64, 3))
    x = torch.randn(2, 3, 16, 16)
    with pytest.warns(UserWarning, match=r"Computing without compilation, because g\+\+ did not finish\."):
        assert_close(ens.for_inference().predict(x), ens.predict(x), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"cannot be compiled, because g\+\+ did not finish; use compile=False"):
        ens.for_inference(compile=True)


def test_a_module_that_cannot_be_traced_is_computed_without(monkeypatch):
    from torch._dynamo.exc import InternalTorchDynamoError

    class Network(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    class Untraceable:
        def __call__(self, module, x):
            raise InternalTorchDynamoError("a mistake in the tracer")

    notes, module, x = [], Network(3, 2), torch.randn(4, 3)
    expected = module(x)
    compilation.compile_modules([module], report=notes.append)
    module._compiled_call_impl.compiled = Untraceable()
    assert_close(module(x), expected)
    assert_close(module(x), expected)
    reason = "torch.compile failed: InternalTorchDynamoError: a mistake in the tracer"
    assert notes == [f"Computing without compilation, because {reason}."]


def test_the_command_line_refuses_in_one_sentence(tmp_path):
    command = [Path(sys.executable).with_name("featureflock"), "train", "digits", "--out", tmp_path / "run"]
    env = os.environ | {"CXX": "/bin/false", "XDG_CACHE_HOME": str(tmp_path)}
    run = subprocess.run([*command, "--compile", "on"], capture_output=True, text=True, env=env, check=False)
    assert run.returncode == 1
    assert run.stderr.startswith(
        "featureflock: --compile on does not work here, because the compiler /bin/false failed"
    )
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.slow
def test_compiled_code_is_stored_in_a_private_folder_only(tmp_path):
    """Also precompiled headers, which ignore TORCHINDUCTOR_CACHE_DIR."""
    code = (
        "import torch, featureflock as ff; from featureflock.models.mlp import MLP; torch.manual_seed(0); "
        "ens = ff.Ensemble([MLP(3, (4,))], torch.nn.Linear(4, 2)); x = torch.randn(5, 3); "
        "assert torch.allclose(ens.for_inference(compile=True).predict(x), ens.predict(x), atol=1e-5)"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(tmp_path), check=True)
    assert predictable_files(tmp_path) == []
    (folder,) = (tmp_path / "cache" / "featureflock" / "compiled").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.suffix for path in folder.rglob("*")} >= {".so", ".gch"}
