"""ff.export: the predictions of onnxruntime and torch.export are those of the ensemble."""

import copy
import importlib
import os
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.small_ensembles import copy_run, train_small
from torch import nn

import featureflock as ff
from featureflock.cli import main as cli
from featureflock.data import Digits
from featureflock.distributed.mesh import Axis, Mesh
from featureflock.evaluation.runs import read_run
from featureflock.integrations.export import export
from featureflock.methods import FeatureWGD
from featureflock.training.recipes import RECIPES

N, C = 2, 4
ONNX = pytest.param(
    ".onnx",
    marks=pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime", "onnxscript")),
        reason="ONNX is not installed",
    ),
)
ENDINGS = [ONNX, ".pt2"]


def network() -> nn.Module:
    layers = (nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.Tanh(), nn.Dropout(), nn.Flatten(), nn.Linear(16, 6))
    return nn.Sequential(*layers, nn.LayerNorm(6))


def random_values(module: nn.Module) -> nn.Module:
    """No statistics or factors of 0 and 1, which would hide mistakes."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data + 0.3 * torch.rand_like(tensor)
    return module


def ensemble(kind: str) -> ff.Ensemble:
    torch.manual_seed(0)
    head, layer, options = nn.Linear(6, C), ff.ParticleLayer(rank=5), {}
    members = [network() for _ in range(N)]
    if kind == "trunk":
        options["trunk"] = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
    elif kind == "rank one":
        members = ff.rank_one(network(), N)
    elif kind == "LoRA":
        members = ff.lora(network(), N, 2, ["0", "5"])
    elif kind == "separate heads":
        head = [nn.Linear(6, C) for _ in range(N)]
    elif kind == "vectorised":
        options["execution"] = kind
    ens = random_values(ff.Ensemble(members, head, layer, **options))
    ens.temperature = 1.7
    return ens.train()


def predictions(path, x):
    """By another program."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(x)
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    assert (given.name, given.shape) == ("input", ["batch", *x.shape[1:]])
    names = [output.name for output in session.get_outputs()]
    assert all(output.shape[0] == "batch" for output in session.get_outputs())
    return dict(zip(names, map(torch.from_numpy, session.run(None, {"input": x.numpy()})), strict=True))


def check(path, inputs, expected, atol=1e-5):
    for rows in (len(inputs), 1, 2):
        actual = predictions(path, inputs[:rows])
        assert actual.keys() == expected.keys()
        for name, values in expected.items():
            torch.testing.assert_close(actual[name], values[:rows], rtol=0, atol=atol)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", ["plain", "trunk", "rank one", "LoRA", "separate heads", "vectorised"])
def test_probabilities_are_those_of_the_ensemble(kind, ending, tmp_path):
    ens, x = ensemble(kind), torch.randn(9, 2, 4, 4)
    before = copy.deepcopy(ens.state_dict())
    ff.export(ens, tmp_path / f"model{ending}", x[:1])
    expected = ens.predict(x)
    assert expected.std(0).min() > 1e-3  # they depend on x
    check(tmp_path / f"model{ending}", x, {"probabilities": expected})
    assert ens.training
    assert all(torch.equal(before[name], tensor) for name, tensor in ens.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == [f"model{ending}"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_tokens_of_rank_one_members(ending, tmp_path):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.linear = nn.Embedding(11, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.linear(self.embedding(x)).tanh().mean(1)

    torch.manual_seed(0)
    ens, x = ff.Ensemble(ff.rank_one(Tokens(), N, init=0.3), nn.Linear(6, C)), torch.randint(11, (7, 5))
    ff.export(ens, tmp_path / f"model{ending}", x)
    check(tmp_path / f"model{ending}", x, {"probabilities": ens.predict(x)})


@pytest.mark.parametrize("ending", ENDINGS)
def test_other_tasks(ending, tmp_path):
    torch.manual_seed(0)
    tasks = [
        (ff.tasks.MultiLabel(), 2, True),
        (ff.tasks.Regression(target_mean=(3.0, -1.0), target_std=(2.0, 0.5)), 2, False),
        (ff.tasks.HeteroscedasticRegression(), 4, True),
    ]
    path, x = tmp_path / f"model{ending}", torch.randn(5, 3)
    for task, outputs, shared in tasks:
        heads = [nn.Linear(6, outputs) for _ in range(N)]
        ens = ff.Ensemble([nn.Linear(3, 6) for _ in range(N)], heads[0] if shared else heads, task=task)
        if ens.log_variance is not None:
            ens.log_variance.data -= 0.7
        setattr(ens, task.calibration, 2.5)
        ff.export(ens, path, x)
        prediction = ens.predict(x)
        named = {"probabilities": prediction} if isinstance(prediction, torch.Tensor) else prediction._asdict()
        assert {*named} == ({"mean", "variance"} if task.kind == "regression" else {"probabilities"})
        check(path, x, named)


@pytest.mark.parametrize("ending", ENDINGS)
def test_preprocessing_is_a_part_of_the_file(ending, tmp_path):
    class Normalise(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.tensor([[[[3.0]], [[90.0]]]]))

        def forward(self, x):
            return (x.float() - self.mean) / 100

    ens, images = ensemble("plain"), torch.randint(256, (5, 2, 4, 4), dtype=torch.uint8)
    for preprocess in (Normalise(), lambda x: x.float() / 255):
        ff.export(ens, tmp_path / f"model{ending}", images, preprocess=preprocess)
        check(tmp_path / f"model{ending}", images, {"probabilities": ens.predict(preprocess(images))})
    assert Normalise().training


class UsesValues(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else 2 * x


class UsesTheBatchSize(nn.Module):
    def forward(self, x):
        return x if x.shape[0] > 4 else 2 * x


class Random(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


def test_mistakes_are_reported_before_anything_is_written(tmp_path):
    ens, x = ff.Ensemble([nn.Linear(3, 4) for _ in range(2)], nn.Linear(4, 2)), torch.ones(2, 3)
    path = tmp_path / "model.pt2"
    path.write_text("previous")
    (tmp_path / "folder.pt2").mkdir()
    odd = {
        module: ff.Ensemble([module(), module()], nn.Linear(3, 2)) for module in (UsesValues, UsesTheBatchSize, Random)
    }
    lazy = ff.Ensemble([nn.LazyLinear(4) for _ in range(2)], nn.Linear(4, 2))
    for arguments, message in [
        ((ens, tmp_path / "model.bin", x), r"must end in .onnx, for onnxruntime, or in .pt2"),
        ((ens, tmp_path / "folder.pt2", x), "is a folder"),
        ((ens, tmp_path / "none" / "model.pt2", x), "a folder that exists"),
        ((ens, path, torch.ones(2, 5)), r"The example, torch.float32 of shape \(2, 5\), does not fit the ensemble: "),
        ((ens, path, torch.ones(2, 3, dtype=torch.int64)), "does not fit the ensemble"),
        ((ens, path, torch.ones(0, 3)), "at least one input"),
        ((ens, path, torch.tensor(1.0)), "must be a batch"),
        ((ens, path, torch.full((2, 3), torch.nan)), "inputs contain NaN"),
        ((lazy, path, x), "has no values yet"),
        ((odd[UsesValues], path, x), "control flow"),
        ((odd[UsesTheBatchSize], path, x), "control flow"),
        ((odd[Random], path, x), "random numbers"),
    ]:
        with pytest.raises(ValueError, match=message):
            ff.export(*arguments)
    with pytest.raises(ValueError, match="takes an Ensemble"):
        ff.export(nn.Linear(3, 2), path, x)
    with pytest.raises(ValueError, match="as one tensor; got ndarray"):
        ff.export(ens, path, np.ones((2, 3)))
    two = Axis()
    two.size = 2
    ens.mesh = Mesh(members=two, world=two)
    with pytest.raises(ValueError, match="divided among processes"):
        ff.export(ens, path, x)
    assert sorted(os.listdir(tmp_path)) == ["folder.pt2", "model.pt2"]
    assert path.read_text() == "previous"


def test_missing_packages_are_reported_with_the_command_that_installs_them(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    ens = ff.Ensemble([nn.Linear(3, 4)], nn.Linear(4, 2))
    for name in ("onnx", "onnxscript"):
        monkeypatch.setitem(sys.modules, name, sys)
    with pytest.raises(ImportError, match=r'needs onnxruntime.*pip install "featureflock\[onnx\]"'):
        export(ens, tmp_path / "model.onnx", torch.ones(2, 3))
    monkeypatch.setattr(sys, "argv", ["featureflock", "export", "run", "--out", str(tmp_path / "model.onnx")])
    with pytest.raises(SystemExit, match=r'pip install "featureflock\[onnx\]"'):
        cli.main()


@pytest.mark.parametrize("ending", ENDINGS)
def test_command_line(ending, monkeypatch, capsys, tmp_path):
    """The file takes image files' bytes from 0 to 255, also for data whose white is 16, and predicts like the run."""
    (run,) = train_small(tmp_path, [FeatureWGD()], [0], epochs=6)
    out = tmp_path / f"model{ending}"
    monkeypatch.setattr(sys, "argv", ["featureflock", "export", str(run), "--out", str(out)])
    cli.main()
    assert "input uint8 from 0 to 255 (batch, 1, 8, 8); calibrated on 100 validation" in capsys.readouterr().out
    splits = Digits().load()
    ens, held_out, test = ff.load(run / "ensemble"), splits.split(validation=100).validation, splits.test
    ff.calibrate(ens, [(held_out.x / 16, held_out.labels)])
    images = (test.x.float() * 255 / 16).round().to(torch.uint8)[:50]
    expected = ens.predict(test.x[:50] / 16)
    assert (expected.argmax(1) == test.labels[:50]).float().mean() > 0.5
    check(out, images, {"probabilities": expected}, atol=1e-4)  # temperatures are fitted by two algorithms
    inputs = read_run(run).inputs
    torch.testing.assert_close(inputs.network_inputs(images), test.x[:50] / 16)


def test_command_line_with_a_table(monkeypatch, tmp_path):
    """The file takes rows in the units of the training data, and predicts in the unit of the targets."""
    recipe = replace(RECIPES["diabetes"].recipe, members=2, epochs=2)
    copy_run(recipe, tmp_path / "run")
    out = tmp_path / "model.pt2"
    monkeypatch.setattr(sys, "argv", ["featureflock", "export", str(tmp_path / "run"), "--out", str(out)])
    cli.main()
    test, ens = recipe.data.load().test, ff.load(tmp_path / "run" / "ensemble")
    x = next(iter(test.batches([torch.arange(9)], torch.device("cpu")))).x
    mean, variance = ens.predict(x)
    assert 50 < mean.mean() < 300
    for name, values in (("mean", mean), ("variance", variance)):
        torch.testing.assert_close(predictions(out, test.x[:9])[name], values, rtol=1e-5, atol=0)
