"""save and load: bit-identical, atomic, and closed to foreign files and code."""

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import featureflock as ff
from featureflock.ensemble import saving

H, C = 6, 3


class Net(nn.Module):
    """Much of what users put into modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")
        self.norm = nn.BatchNorm2d(4)
        self.again = self.norm  # one module at two places
        self.act = F.gelu
        self.squash = torch.tanh
        self.scale = torch.tensor([0.5])  # a tensor that is neither parameter nor buffer
        self.sizes = (1, [2.5, float("inf")], {"a": None, "b": torch.float32})
        self.norm_class = nn.BatchNorm2d
        self.register_buffer("shift", torch.randn(4, 1, 1), persistent=False)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight  # tied
        self.first.bias.requires_grad_(False)
        self.out = nn.Linear(4, H)

    def forward(self, x):
        x = self.act(self.norm(self.conv(x)) + self.shift) * self.scale
        return self.out(self.squash(self.second(self.first(x.mean((-2, -1))))))


class Recurrent(nn.Module):
    """An RNN, which keeps references to its weights, and an attribute that is a parameter's second name."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(2, H, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(2 * H, H)
        self.weights = [self.out.weight]

    def forward(self, x):
        return self.rnn(x.flatten(2).transpose(1, 2))[0].mean(1) @ self.weights[0].T + self.out.bias


class Lambda(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, H)
        self.act = lambda x: x.sin()

    def forward(self, x):
        return self.act(self.linear(x.mean((-2, -1))))


X = torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(0))


def trained(make=Net, own_heads: bool = False) -> ff.Ensemble:
    torch.manual_seed(0)
    extractors = [make() for _ in range(3)]
    layer = ff.ParticleLayer(ff.Normal(0.1), ff.RBF("official"), 2, "weakest", ff.SteinWGD(eta=0.1))
    head = [nn.Linear(H, C) for _ in range(3)] if own_heads else nn.Linear(H, C)
    ens = ff.Ensemble(extractors, head, None if own_heads else layer)
    optimiser = torch.optim.SGD([p for p in ens.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        F.cross_entropy(ens(X).flatten(0, 1), torch.arange(15) % C).backward()
        optimiser.step()
    return ens


@pytest.mark.parametrize("own_heads", [False, True])
def test_comes_back_bit_for_bit(tmp_path, own_heads):
    ens = trained(own_heads=own_heads)
    ens.extractors[1].norm.eval()
    ff.save(ens, tmp_path / "ens")
    back = ff.load(tmp_path / "ens")
    assert torch.equal(back.predict(X), ens.predict(X))
    assert repr(back) == repr(ens)
    for a, b in zip(ens.modules(), back.modules(), strict=True):
        assert a.training == b.training
    for (name, a), (other, b) in zip(ens.named_parameters(), back.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a, b)
        assert a.requires_grad == b.requires_grad
    member = back.extractors[2]
    assert member.sizes == (1, [2.5, float("inf")], {"a": None, "b": torch.float32})
    assert member.again is member.norm
    assert member.second.weight is member.first.weight
    assert "shift" not in dict(member.state_dict())


def test_goes_on_training_the_same(tmp_path):
    ens = trained()
    ff.save(ens, tmp_path)
    grads = []
    for e in (ens, ff.load(tmp_path)):
        e.zero_grad()
        F.cross_entropy(e(X).flatten(0, 1), torch.arange(15) % C).backward()
        grads.append([p.grad for p in e.parameters() if p.requires_grad])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_channels_last_and_other_dtypes_come_back_as_they_were(tmp_path):
    ens = trained().to(memory_format=torch.channels_last)
    ens.extractors[0].out.to(torch.float64)
    ff.save(ens, tmp_path)
    back = ff.load(tmp_path)
    assert back.extractors[1].conv.weight.stride() == ens.extractors[1].conv.weight.stride()
    assert back.extractors[0].out.weight.dtype == torch.float64
    ens.extractors[0].out.float()
    back.extractors[0].out.float()
    x = X.to(memory_format=torch.channels_last)
    assert torch.equal(back.predict(x), ens.predict(x))


def test_recurrent_networks_and_second_names_of_parameters(tmp_path):
    ens = trained(Recurrent)
    ff.save(ens, tmp_path)
    back = ff.load(tmp_path)
    assert torch.equal(back.predict(X), ens.predict(X))
    assert back.extractors[1].weights[0] is back.extractors[1].out.weight
    for e in (ens, back):
        e.zero_grad()
        F.cross_entropy(e(X).flatten(0, 1), torch.arange(15) % C).backward()
    for a, b in zip(ens.parameters(), back.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_unusual_layouts_come_back(tmp_path):
    convs = [nn.Conv2d(1, 4, 2).to(memory_format=torch.channels_last) for _ in range(2)]
    convs[0].register_buffer("expanded", torch.arange(4.0).expand(6, 4))
    ens = ff.Ensemble([nn.Sequential(c, nn.Flatten()) for c in convs], nn.LazyLinear(C))
    x = torch.randn(3, 1, 5, 5)
    ens(x)
    ff.save(ens, tmp_path)
    back = ff.load(tmp_path)
    assert back.extractors[1][0].weight.stride() == convs[1].weight.stride()
    assert torch.equal(back.extractors[0][0].expanded, convs[0].expanded)
    assert torch.equal(back.predict(x), ens.predict(x))


def test_a_new_process_gets_the_same_bits(tmp_path):
    torch.manual_seed(0)
    ens = ff.Ensemble([nn.Sequential(nn.Flatten(), nn.Linear(32, H), nn.ReLU()) for _ in range(3)], nn.Linear(H, C))
    ff.save(ens, tmp_path / "ens")
    torch.save((X, ens.predict(X)), tmp_path / "io.pt")
    script = """
        import sys, torch, featureflock as ff
        x, p = torch.load(sys.argv[2])
        assert torch.equal(ff.load(sys.argv[1]).predict(x), p)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "ens", tmp_path / "io.pt"], check=True, timeout=120
    )


def test_classes_must_be_imported_before(tmp_path):
    ff.save(trained(), tmp_path / "ens")
    script = "import sys, featureflock as ff\ntry: ff.load(sys.argv[1])\nexcept ValueError as e: print(e)"
    run = subprocess.run([sys.executable, "-c", script, tmp_path / "ens"], check=True, capture_output=True, text=True)
    assert "Net, which this program has not imported; import it and load again" in run.stdout


def test_what_json_cannot_describe_is_saved_and_filled_into(tmp_path):
    ens = trained(Lambda)
    with pytest.warns(UserWarning, match=r"Saving weights only, because extractors.0.act is a function"):
        ff.save(ens, tmp_path)
    with pytest.raises(ValueError, match=r"extractors.0.act is a function.*into=ensemble"):
        ff.load(tmp_path)
    torch.manual_seed(9)
    other = ff.Ensemble([Lambda() for _ in range(3)], nn.Linear(H, C))
    assert ff.load(tmp_path, into=other) is other
    assert torch.equal(other.predict(X), ens.predict(X))


def test_hooks_and_classes_made_at_run_time_are_not_described(tmp_path):
    ens = trained()
    ens.extractors[0].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="hooks"):
        ff.save(ens, tmp_path)
    with pytest.raises(ValueError, match=r"extractors\.0 has hooks"):
        ff.load(tmp_path)
    ens = ff.Ensemble([nn.utils.parametrizations.weight_norm(nn.Linear(2, H))], nn.Linear(H, C))
    with pytest.warns(UserWarning, match="by its name"):
        ff.save(ens, tmp_path)
    with pytest.raises(ValueError, match="cannot be found again by its name"):
        ff.load(tmp_path)


def test_into_must_fit(tmp_path):
    ff.save(trained(), tmp_path)
    with pytest.raises(ValueError, match=r"Only .* has a tensor extractors.0.again.bias"):
        ff.load(tmp_path, into=ff.Ensemble([Lambda() for _ in range(3)], nn.Linear(H, C)))
    other = ff.Ensemble([Net() for _ in range(3)], nn.Linear(H, C + 1))
    before = [p.clone() for p in other.parameters()]
    with pytest.raises(ValueError, match=r"head.weight is torch.float32 \(3, 6\) in .* and torch.float32 \(4, 6\)"):
        ff.load(tmp_path, into=other)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


# Damage


def weights_file(folder: Path) -> Path:
    (path,) = folder.glob("weights-*.safetensors")
    return path


def index_of(folder: Path) -> dict:
    return json.loads((folder / "ensemble.json").read_text())


def forge(folder: Path, index: dict) -> None:
    """An altered index with a digest that fits: by malice, not by accident."""
    index.pop("sha256", None)
    (folder / "ensemble.json").write_text(json.dumps({**index, "sha256": saving._digest(index)}))


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_refuses_truncated_weights(tmp_path, keep):
    ff.save(trained(), tmp_path)
    path = weights_file(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="missing, truncated or altered"):
        ff.load(tmp_path)


def test_refuses_a_flipped_bit_and_a_missing_file(tmp_path):
    ff.save(trained(), tmp_path)
    path = weights_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="altered"):
        ff.load(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="missing"):
        ff.load(tmp_path)


def test_refuses_foreign_and_truncated_json(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no saved ensemble"):
        ff.load(tmp_path / "nowhere")
    ff.save(trained(), tmp_path)
    index = tmp_path / "ensemble.json"
    text = index.read_text()
    for damage, words in [
        (text[: len(text) // 2], "no readable JSON"),
        ("", "no readable JSON"),
        ("\x80", "not written by|no readable"),
        ('{"a": 1}', "not written by featureflock.save"),
        ("[1, 2]", "not written by featureflock.save"),
        (json.dumps({**json.loads(text), "version": 99}), "has format 99"),
        (text.replace("0.1", "0.2"), "altered after saving"),
        ("[" * 100_000, "no readable JSON"),
    ]:
        index.write_text(damage)
        with pytest.raises(ValueError, match=words):
            ff.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": {}},
        {"weights": {"file": "w" * 5000, "sha256": ""}},
        {"weights": 3},
        {"tensors": {}},
        {"state": {"a": "b"}},
        {"state": None},
        {"modules": {"class": "torch.nn.modules.linear.Linear"}},
        {"modules": []},
    ],
)
def test_refuses_a_forged_index(tmp_path, change):
    ff.save(trained(), tmp_path)
    forge(tmp_path, {**index_of(tmp_path), **change})
    with pytest.raises(ValueError, match="altered after saving"):
        ff.load(tmp_path)


def test_runs_no_code_from_the_file(tmp_path):
    ens = trained()
    ff.save(ens, tmp_path)
    text = (tmp_path / "ensemble.json").read_text()
    own = f"{Net.__module__}.Net"
    for foreign in ("os.system", "subprocess.Popen", "builtins.eval", "torch.fx.graph_module.GraphModule"):
        forge(tmp_path, json.loads(text.replace(own, foreign)))
        with pytest.raises(ValueError, match="has not imported"):
            ff.load(tmp_path)
    calls = [
        ["function", "os.system"],
        ["function", "F.__import__"],
        ["law", "eval", {}],
        ["law", "RBF"],
        ["pickle", "x"],
    ]
    for call in calls:
        index = json.loads(text)
        index["modules"]["children"]["extractors"]["children"]["0"]["attributes"]["act"] = call
        forge(tmp_path, index)
        with pytest.raises(ValueError, match="altered after saving"):
            ff.load(tmp_path)
    index = json.loads(text)
    index["modules"]["attributes"]["_forward_hooks"] = {"0": None}
    forge(tmp_path, index)
    with pytest.raises(ValueError, match="altered after saving"):
        ff.load(tmp_path)


def test_weights_outside_the_folder_are_not_read(tmp_path):
    ff.save(trained(), tmp_path / "ens")
    path = weights_file(tmp_path / "ens")
    path.rename(tmp_path / path.name)
    index = index_of(tmp_path / "ens")
    index["weights"]["file"] = f"../{path.name}"
    forge(tmp_path / "ens", index)
    with pytest.raises(ValueError, match="altered after saving"):
        ff.load(tmp_path / "ens")


# Writing


@pytest.mark.parametrize("files_written", [0, 1])
def test_an_interrupted_save_leaves_the_old_ensemble(tmp_path, monkeypatch, files_written):
    old, new = trained(), trained()
    ff.save(old, tmp_path)
    with torch.no_grad():
        new.head.bias += 1
    replace, calls = os.replace, []

    def failing(a, b):
        if len(calls) == files_written:
            raise KeyboardInterrupt
        calls.append(b)
        replace(a, b)

    monkeypatch.setattr(saving.os, "replace", failing)
    with pytest.raises(KeyboardInterrupt):
        ff.save(new, tmp_path)
    monkeypatch.undo()
    assert torch.equal(ff.load(tmp_path).predict(X), old.predict(X))
    assert not list(tmp_path.glob(".*"))
    ff.save(new, tmp_path)
    assert torch.equal(ff.load(tmp_path).predict(X), new.predict(X))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ensemble.json", weights_file(tmp_path).name]


def test_killed_while_saving_the_old_or_the_new_is_there(tmp_path):
    """A real process, really killed, at many moments of an endless series of saves."""
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
            if k == 1: print("started", flush=True)
    """
    for delay in (0.0, 0.003, 0.01, 0.017, 0.05):
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), tmp_path], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout.readline() == "started\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(delay)
            process.kill()
        values = {float(p.detach().flatten()[0]) for p in ff.load(tmp_path).parameters()}
        assert len(values) == 1


def test_other_files_in_the_folder_stay(tmp_path):
    for name in ("weights-best.safetensors", ".mine.partial", "notes.txt"):
        (tmp_path / name).write_text("mine")
    for _ in range(2):
        ff.save(trained(own_heads=bool(_)), tmp_path)
    for name in ("weights-best.safetensors", ".mine.partial", "notes.txt"):
        assert (tmp_path / name).read_text() == "mine"
    left = tmp_path / f".featureflock-{'0' * 32}.partial"
    left.write_text("of a save that was killed")
    os.utime(left, (0, 0))
    ff.save(trained(), tmp_path)
    assert not left.exists()
    assert len([p for p in tmp_path.iterdir() if saving._WEIGHTS.fullmatch(p.name)]) == 1


def test_several_may_save_at_once(tmp_path):
    ensembles = [trained(own_heads=own) for own in (False, True)]

    def save_often(ens):
        for _ in range(10):
            ff.save(ens, tmp_path)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save_often, ensembles * 2))
    assert any(torch.equal(ff.load(tmp_path).predict(X), ens.predict(X)) for ens in ensembles)


def test_says_what_cannot_be_saved(tmp_path):
    with pytest.raises(TypeError, match="takes an Ensemble; got Linear"):
        ff.save(nn.Linear(2, 3), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        ff.save(trained(), tmp_path / "file")
    with pytest.raises(ValueError, match="has no values yet"):
        ff.save(ff.Ensemble([nn.LazyLinear(3)], nn.Linear(3, 2)), tmp_path)
    sparse = nn.Linear(2, 3)
    sparse.register_buffer("mask", torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match=r"extractors.0.mask is sparse"):
        ff.save(ff.Ensemble([sparse], nn.Linear(3, 2)), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]
