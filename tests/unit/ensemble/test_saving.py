"""save and load: bit-identical, atomic, and safe for untrusted files."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors
import torch
import torch.nn.functional as F
from torch import nn

import featureflock as ff
from featureflock.core import PRIORS
from featureflock.ensemble import module_codec, saving
from featureflock.utils import files
from featureflock.utils.digests import json_digest

H, C = 6, 3


class Net(nn.Module):
    """Many kinds of attributes that users put into modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")
        self.norm = nn.BatchNorm2d(4)
        self.again = self.norm  # one module under two names
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
    """An RNN, which has references to its weights, and a parameter under a second name."""

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
def test_round_trip_is_bit_identical(tmp_path, own_heads):
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


def test_training_continues_identically(tmp_path):
    ens = trained()
    ff.save(ens, tmp_path)
    grads = []
    for e in (ens, ff.load(tmp_path)):
        e.zero_grad()
        F.cross_entropy(e(X).flatten(0, 1), torch.arange(15) % C).backward()
        grads.append([p.grad for p in e.parameters() if p.requires_grad])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_round_trip_of_memory_format_and_dtype(tmp_path):
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


def test_round_trip_of_recurrent_networks_and_shared_parameters(tmp_path):
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


def test_round_trip_of_unusual_layouts(tmp_path):
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


def test_weights_of_modules_that_json_cannot_represent(tmp_path):
    ens = trained(Lambda)
    with pytest.warns(UserWarning, match=r"Saving weights only, because extractors.0.act is a function"):
        ff.save(ens, tmp_path)
    with pytest.raises(ValueError, match=r"extractors.0.act is a function.*into=ensemble"):
        ff.load(tmp_path)
    torch.manual_seed(9)
    other = ff.Ensemble([Lambda() for _ in range(3)], nn.Linear(H, C))
    assert ff.load(tmp_path, into=other) is other
    assert torch.equal(other.predict(X), ens.predict(X))


def test_hooks_and_classes_created_at_run_time_are_not_saved(tmp_path):
    ens = trained()
    ens.extractors[0].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="hooks"):
        ff.save(ens, tmp_path)
    with pytest.raises(ValueError, match=r"extractors\.0 has hooks"):
        ff.load(tmp_path)
    ens = ff.Ensemble([nn.utils.parametrizations.weight_norm(nn.Linear(2, H))], nn.Linear(H, C))
    with pytest.warns(UserWarning, match="by its name"):
        ff.save(ens, tmp_path)
    with pytest.raises(ValueError, match="cannot be found by its name"):
        ff.load(tmp_path)


def test_into_must_have_the_same_architecture(tmp_path):
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
    """Write a modified index with a matching digest, as an attacker would."""
    index.pop("sha256", None)
    (folder / "ensemble.json").write_text(json.dumps({**index, "sha256": json_digest(index)}))


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_truncated_weights_raise(tmp_path, keep):
    ff.save(trained(), tmp_path)
    path = weights_file(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="missing, truncated or modified"):
        ff.load(tmp_path)


def test_a_flipped_bit_and_a_missing_file_raise(tmp_path):
    ff.save(trained(), tmp_path)
    path = weights_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="modified"):
        ff.load(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="missing"):
        ff.load(tmp_path)


def test_json_of_other_programs_and_truncated_json_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no saved ensemble"):
        ff.load(tmp_path / "nowhere")
    ff.save(trained(), tmp_path)
    index = tmp_path / "ensemble.json"
    text = index.read_text()
    for damage, words in [
        (text[: len(text) // 2], "not valid JSON"),
        ("", "not valid JSON"),
        ("\x80", "not written by|not valid JSON"),
        ('{"a": 1}', "not written by featureflock.save"),
        ("[1, 2]", "not written by featureflock.save"),
        (json.dumps({**json.loads(text), "version": 99}), "has format 99"),
        (text.replace("0.1", "0.2"), "modified after saving"),
        ("[" * 100_000, "nested too deeply"),
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
def test_a_forged_index_raises(tmp_path, change):
    ff.save(trained(), tmp_path)
    forge(tmp_path, {**index_of(tmp_path), **change})
    with pytest.raises(ValueError, match=r"ensemble\.json (is damaged or )?was modified|it was modified after saving"):
        ff.load(tmp_path)


def test_no_code_of_the_file_is_executed(tmp_path):
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
        ["kernel", "rbf"],
        ["pickle", "x"],
    ]
    for call in calls:
        index = json.loads(text)
        index["modules"]["children"]["extractors"]["children"]["0"]["attributes"]["act"] = call
        forge(tmp_path, index)
        with pytest.raises(ValueError, match="modified after saving"):
            ff.load(tmp_path)
    index = json.loads(text)
    index["modules"]["attributes"]["_forward_hooks"] = {"0": None}
    forge(tmp_path, index)
    with pytest.raises(ValueError, match="modified after saving"):
        ff.load(tmp_path)


@dataclass(frozen=True)
class Laplace:
    """A user-defined prior."""

    precision: float = 1.0

    def score(self, x):
        return -self.precision * x.sign()


def test_a_registered_prior_is_saved_and_an_unregistered_one_is_not(tmp_path):
    ens = ff.Ensemble([nn.Linear(2, H)], nn.Linear(H, C), ff.ParticleLayer(Laplace(3.0)))
    with pytest.warns(UserWarning, match=r"layer.prior is a Laplace, which JSON cannot represent"):
        ff.save(ens, tmp_path)
    PRIORS.add("laplace", Laplace)
    try:
        ff.save(ens, tmp_path)
        assert ff.load(tmp_path).layer.prior == Laplace(3.0)
    finally:
        del PRIORS["laplace"]
    with pytest.raises(ValueError, match=r"'laplace', which is not registered; import it .* FEATUREFLOCK_PLUGINS"):
        ff.load(tmp_path)


def test_weights_outside_the_folder_are_not_read(tmp_path):
    ff.save(trained(), tmp_path / "ens")
    path = weights_file(tmp_path / "ens")
    path.rename(tmp_path / path.name)
    index = index_of(tmp_path / "ens")
    index["weights"]["file"] = f"../{path.name}"
    forge(tmp_path / "ens", index)
    with pytest.raises(ValueError, match="modified after saving"):
        ff.load(tmp_path / "ens")


# Writing


class FaultError(Exception):
    """Raised in place of a write."""


@pytest.fixture
def fault_at(monkeypatch):
    """A function that makes the k-th write, flush or rename of `save` fail, before or after it is done."""

    def inject(k: int, after: bool) -> list[str]:
        calls: list[str] = []

        def failing(name, function):
            def call(*args, **options):
                if len(calls) == k:  # the fault has happened
                    return function(*args, **options)
                calls.append(name)
                if len(calls) < k:
                    return function(*args, **options)
                if after and name != "open":
                    function(*args, **options)
                raise FaultError

            return call

        for module, name in ((saving, "save_file"), (os, "fsync"), (os, "replace"), (files, "open")):
            monkeypatch.setattr(module, name, failing(name, getattr(module, name, open)), raising=False)
        return calls

    return inject


@pytest.mark.parametrize("after", [False, True])
def test_a_fault_at_any_write_leaves_the_old_or_the_new_ensemble(tmp_path, monkeypatch, fault_at, after):
    old, new = trained(), trained()
    with torch.no_grad():
        new.head.bias += 1
    for k in range(1, 100):
        ff.save(old, tmp_path)
        calls = fault_at(k, after)
        with suppress(FaultError):
            ff.save(new, tmp_path)
        monkeypatch.undo()
        complete = calls.count("replace") == 2 and (after or calls[-1] != "replace")  # of weights, then of the index
        assert torch.equal(ff.load(tmp_path).predict(X), (new if complete else old).predict(X)), calls
        assert not list(tmp_path.glob(".*"))
        if not complete:
            weights_file(tmp_path)  # there is only one
        if len(calls) < k:
            break
        for path in {*tmp_path.glob("weights-*")} - {tmp_path / index_of(tmp_path)["weights"]["file"]}:
            os.utime(path, (0, 0))  # old enough to be removed by the next save
    assert calls.count("replace") == 2
    ff.save(new, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ensemble.json", weights_file(tmp_path).name]


def test_a_full_disk_is_an_oserror(tmp_path, monkeypatch):
    def full(*_):
        raise safetensors.SafetensorError("No space left on device")

    monkeypatch.setattr(saving, "save_file", full)
    with pytest.raises(OSError, match="cannot be written: No space left"):
        ff.save(trained(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    for name in ("weights-best.safetensors", ".mine.partial", "notes.txt"):
        (tmp_path / name).write_text("mine")
    for _ in range(2):
        ff.save(trained(own_heads=bool(_)), tmp_path)
    for name in ("weights-best.safetensors", ".mine.partial", "notes.txt"):
        assert (tmp_path / name).read_text() == "mine"
    left = tmp_path / f".featureflock-{'0' * 8}-1-{'0' * 32}.partial"
    left.write_text("of a killed save")
    os.utime(left, (0, 0))
    ff.save(trained(), tmp_path)
    assert not left.exists()
    assert len([p for p in tmp_path.iterdir() if saving._WEIGHTS.fullmatch(p.name)]) == 1


def test_concurrent_saves(tmp_path):
    ensembles = [trained(own_heads=own) for own in (False, True)]

    def save_often(ens):
        for _ in range(10):
            ff.save(ens, tmp_path)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save_often, ensembles * 2))
    assert any(torch.equal(ff.load(tmp_path).predict(X), ens.predict(X)) for ens in ensembles)


def test_ensembles_that_cannot_be_saved_raise(tmp_path):
    with pytest.raises(ValueError, match="takes an Ensemble; got Linear"):
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


@dataclass(frozen=True)
class Config:
    """A configuration object of another library."""

    width: int


class Configured(nn.Linear):
    def __init__(self) -> None:
        super().__init__(H, H)
        self.config = Config(7)


def test_objects_of_other_libraries_have_a_codec(tmp_path, monkeypatch):
    """Which a module of featureflock registers when it is imported."""
    ens = ff.Ensemble([Configured()], nn.Linear(H, C))
    codec = module_codec.ObjectCodec(lambda value: isinstance(value, Config), lambda c: [c.width], lambda w: Config(*w))
    monkeypatch.setitem(module_codec.OBJECTS, "featureflock.other_library", codec)
    ff.save(ens, tmp_path)
    assert ff.load(tmp_path).extractors[0].config == Config(7)
    monkeypatch.delitem(module_codec.OBJECTS, "featureflock.other_library")
    with pytest.raises(ValueError, match=r"modules of another library\. No module named 'featureflock.other_library'"):
        ff.load(tmp_path)
