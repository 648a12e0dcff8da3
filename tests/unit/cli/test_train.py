"""featureflock train: help, flags, error messages, output, TensorBoard."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image

import featureflock as ff
from featureflock.cli import train as command
from featureflock.cli.main import COMMANDS, main
from featureflock.cli.recipe_flags import train_command
from featureflock.core import PRIORS
from featureflock.data import MNIST, HeldOut
from featureflock.methods import METHODS, FeatureMAP, FeatureWGD, Single
from featureflock.models import MODELS, CNNConfig, RankOneConfig, SharedTrunkConfig, WideResNetConfig
from featureflock.training import RECIPES, Recipe
from featureflock.training.build import rebuild
from featureflock.training.run_folder import RunFolder


def flock(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["featureflock", *map(str, words)])
    monkeypatch.setenv("COLUMNS", "120")
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    out, errors = capsys.readouterr()
    return code, out, errors


def parsed(monkeypatch, *words: str):
    """Recipe and ComputeConfig of the flags."""
    seen = []
    monkeypatch.setattr(command, "_run", lambda name, flags, options: seen.append((options.recipe, options.compute)))
    command.main(list(words))
    return seen[0]


# Flags


def test_every_flag_reaches_the_recipe(monkeypatch):
    recipe, compute = parsed(
        monkeypatch,
        *[
            "cifar10-wrn16x4",
            "--members",
            "5",
            "--epochs",
            "20",
            "--method.rank",
            "4",
            "--decay-epochs",
            "10",
            "15",
            "--no-nesterov",
            "--subset",
            "100",
        ],
        *[
            "--validation",
            "50",
            "--model.width",
            "2",
            "--data.no-flip",
            "--precision",
            "bfloat16",
            "--compile",
            "off",
            "--device",
            "cpu",
            "--seed",
            "3",
        ],
    )
    base = RECIPES["cifar10-wrn16x4"].recipe
    assert recipe.method == FeatureWGD(ff.Cauchy(1e-3), rank=4)
    assert recipe.model == WideResNetConfig(16, 2)
    assert (recipe.members, recipe.epochs, recipe.decay_epochs, recipe.nesterov) == (5, 20, (10, 15), False)
    assert (recipe.subset, recipe.validation, recipe.seed, recipe.precision) == (100, 50, 3, "bfloat16")
    assert recipe.data.flip is False
    assert recipe.data.padding == 4
    assert (compute.compile, compute.device) == ("off", "cpu")
    assert (recipe.weight_decay, recipe.batch) == (base.weight_decay, base.batch)


def test_components_are_chosen_by_name_and_their_fields_are_flags(monkeypatch):
    recipe, _ = parsed(
        monkeypatch,
        *[
            "digits",
            "--method.prior",
            "normal",
            "--method.prior.precision",
            "0.5",
            "--method.rule",
            "stein-wgd",
            "--method.rule.eta",
            "0.1",
        ],
        *["--model=cnn", "--model.width", "8", "--method.kernel", "rbf", "--method.kernel.bandwidth", "official"],
    )
    assert recipe.method == FeatureWGD(ff.Normal(0.5), ff.RBF("official"), 1, rule=ff.SteinWGD(eta=0.1))
    assert recipe.model == CNNConfig(8)
    assert parsed(monkeypatch, "digits", "--method", "feature-map")[0].method == FeatureMAP()
    single, _ = parsed(monkeypatch, "digits", "--method", "single")
    assert single.method == Single()
    assert single.members == 1
    assert parsed(monkeypatch, "digits", "--method", "weight-wgd", "--method", "single")[0].method == Single()
    same, _ = parsed(
        monkeypatch, "cifar100-wrn16x4", "--method", "feature-wgd"
    )  # naming the current method keeps its prior
    assert same == RECIPES["cifar100-wrn16x4"].recipe


def test_held_out_data_are_those_of_the_recipe(monkeypatch):
    recipe, _ = parsed(monkeypatch, *("mnist-cnn", "--data", "held-out", "--data.examples", "50", "--data.data.flip"))
    assert recipe.data == HeldOut(MNIST(flip=True), 50)


def test_sharing_is_of_the_network_of_the_recipe(monkeypatch):
    recipe, _ = parsed(monkeypatch, "mnist-cnn", "--model", "rank-one", "--model.std", "0.5")
    assert recipe.model == RankOneConfig(RECIPES["mnist-cnn"].recipe.model, 0.5)
    flags = [
        "--model",
        "shared-trunk",
        "--model.base",
        "wide-resnet",
        "--model.base.depth",
        "10",
        "--model.blocks",
        "2",
    ]
    recipe, _ = parsed(monkeypatch, "mnist-cnn", *flags)
    assert recipe.model == SharedTrunkConfig(WideResNetConfig(10), 2)


def test_help_lists_recipes_commands_and_fields(monkeypatch, capsys):
    code, out, _ = flock(monkeypatch, capsys, "train", "--help")
    assert code == 0
    assert all(name in out for name in RECIPES)
    code, out, _ = flock(monkeypatch, capsys, "--help")
    assert all(f"featureflock {name}" in out for name in COMMANDS)
    code, out, _ = flock(monkeypatch, capsys, "train", "cifar100-resnet32", "--help")
    assert code == 0
    for flag in (
        "--members",
        "--learning-rate",
        "--method.rank",
        "--method.prior.precision",
        "--data.padding",
        "--subset",
    ):
        assert flag in out
    assert "225 250" in " ".join(out.replace("│", " ").split())  # the defaults of that recipe


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "cifar10-wrn14x4"], r"no recipe 'cifar10-wrn14x4'; did you mean cifar10-wrn16x4\?"),
        (["train", "digits", "--epoch", "3"], "--epochs"),
        (["train", "digits", "--method.rnk", "3"], "--method.rank"),
        (["train", "digits", "--method", "wgd"], "feature-wgd"),
        (["train", "digits", "--epochs", "many"], "--epochs"),
        (["train", "digits", "--epochs", "0"], "epochs must be at least 1; got 0"),
        (["train", "digits", "--method.prior.precision", "-1"], "Cauchy needs a finite precision"),
        (["train", "digits", "--method", "single", "--members", "3"], "Single trains one network, got members=3"),
        (["train", "digits", "--method", "deep-ensembles", "--method.prior", "normal"], "DeepEnsembles has no prior"),
        (["train", "digits", "--subset", "5000"], "subset must be 1 to 1200"),
        (["train", "digits", "--validation", "1200"], "to leave training examples"),
        (["train", "digits", "--model", "wide-resnet", "--model.depth", "17"], "depth"),
        (["train", "imagenet-resnet50", "--data.folder", "nowhere"], "There is no folder nowhere"),
        (["train", "digits", "--out", "/proc/nowhere/run"], "cannot be created"),
        (["train", "--members", "3"], "The name of a recipe comes first"),
        (["trainn"], r"no command 'trainn'; did you mean train\?"),
    ],
)
def test_mistakes_get_words_and_leave_nothing(words, said, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, errors = flock(monkeypatch, capsys, *words)
    assert code != 0
    assert re.search(said, errors)
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


@patch.dict(METHODS)  # removes what the plug-in adds
@patch.dict(MODELS)
def test_a_plugin_adds_components_to_the_command_line(monkeypatch, capsys, tmp_path):
    """One file with a registered method and model, found through FEATUREFLOCK_PLUGINS, trains like a built-in one."""
    (tmp_path / "my_plugin.py").write_text(
        "from dataclasses import dataclass\n"
        "from torch import nn\n"
        "from featureflock.methods import METHODS, DeepEnsembles\n"
        "from featureflock.models import MODELS, ModelConfig\n"
        "@METHODS.register('my-method')\n"
        "@dataclass(frozen=True)\n"
        "class MyMethod(DeepEnsembles):\n"
        "    title = 'My method'\n"
        "    strength: float = 1.0\n"
        "@MODELS.register('my-model')\n"
        "@dataclass(frozen=True)\n"
        "class MyModel(ModelConfig):\n"
        "    def extractor(self, shape):\n"
        "        flat = nn.Flatten()\n"
        "        flat.feature_dim = 64\n"
        "        return flat\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEATUREFLOCK_PLUGINS", "my_plugin")
    words = [
        "--method",
        "my-method",
        "--method.strength",
        "2",
        "--model",
        "my-model",
        "--members",
        "2",
        "--epochs",
        "1",
    ]
    code, out, errors = flock(monkeypatch, capsys, "train", "digits", *words)
    assert code == 0, errors
    assert "digits: my-method, members: 2" in out
    run = RunFolder(Path("runs/digits-my-method-seed0"))
    assert Recipe.from_json(run.read_recipe()).method.strength == 2
    assert len(rebuild(run)) == 2
    sys.modules.pop("my_plugin")


def test_a_missing_data_set_is_reported_with_the_command_that_downloads_it(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEATUREFLOCK_CACHE", str(tmp_path / "cache"))
    code, _, errors = flock(monkeypatch, capsys, "train", "cifar10-small")
    assert code == 1
    assert "featureflock data get cifar10" in errors
    assert not (tmp_path / "runs").exists()


def test_the_suggested_command_differs_in_the_method_only():
    flags = ["--members", "3", "--method", "feature-wgd", "--method.rank=2", "--decay-epochs", "2", "3", "--resume"]
    flags += ["--out", "a", "--seed", "4"]
    wanted = "featureflock train digits --members 3 --decay-epochs 2 3 --seed 4 --method deep-ensembles"
    without = {"method", "mesh", "out", "resume"}
    assert train_command("digits", flags, without, ["--method", "deep-ensembles"]) == wanted


class NoDataclass:
    def score(self, x):
        return -x


@dataclass(frozen=True)
class NoDefault(NoDataclass):
    scale: float


@pytest.mark.parametrize("prior", [NoDataclass, NoDefault])
def test_components_that_cannot_be_flags_are_refused(prior, monkeypatch, capsys):
    monkeypatch.setitem(PRIORS, "mine", prior)
    code, _, errors = flock(monkeypatch, capsys, "train", "digits", "--method.prior", "mine")
    expected = f"--method.prior mine: {prior.__name__} must be a dataclass with a default for each field."
    assert (code, errors) == (1, f"featureflock: {expected}\n")


# Runs


def test_without_tensorboard_the_command_that_installs_it_is_printed(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    words = ["train", "digits", "--members", "1", "--epochs", "1", "--subset", "100", "--out", str(tmp_path / "run")]
    code, out, _ = flock(monkeypatch, capsys, *words)
    assert code == 0
    assert 'is not installed: pip install "featureflock[tensorboard]"' in out
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_run_prints_its_progress_and_writes_tensorboard_curves(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["train", "digits", "--members", "2", "--epochs", "2", "--subset", "300", "--validation", "100"]
    code, out, _ = flock(monkeypatch, capsys, *words)
    assert code == 0
    assert "Computing on cpu, float32" in out
    assert re.search(
        r"epoch 2/2, learning rate 0.03, loss \d\.\d+, accuracy \d+\.\d+ %, validation \d+\.\d+ % \(NLL", out
    )
    run = Path("runs/digits-feature-wgd-seed0")
    assert f"featureflock.load('{run}/ensemble')" in out
    assert len(ff.load(run / "ensemble")) == 2
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("cross_entropy")] == [1, 2]
    assert {"accuracy", "learning_rate", "validation/nll", "validation/member_accuracy/1"} <= set(
        events.Tags()["scalars"]
    )
    code, _, errors = flock(monkeypatch, capsys, *words)
    assert code == 1
    assert "already contains a run; add --resume" in errors


def test_a_hint_shows_the_torchrun_command(monkeypatch, capsys, tmp_path):
    """Nothing is started unasked; the hint repeats the arguments."""
    monkeypatch.setattr("featureflock.training.loop.faster_processes", lambda compute, resolved, members: members)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    words = ["digits", "--members", "2", "--epochs", "1", "--subset", "100", "--out", str(tmp_path / "run")]
    code, out, _ = flock(monkeypatch, capsys, "train", *words)
    assert code == 0
    hint = "OMP_NUM_THREADS=2 torchrun --nproc-per-node=2 -m featureflock train"
    assert f"Hint: 2 processes would be faster: {hint} {' '.join(words)} --mesh.members 2\n" in out


def test_damaged_images_are_reported_and_skipped(monkeypatch, capsys, tmp_path):
    """The ImageNet recipe on a small tree of JPEGs, two of which are damaged, with worker processes."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for part, count in (("train", 20), ("val", 5)):
        for label in range(2):
            folder = tmp_path / "net" / part / f"n{label}"
            folder.mkdir(parents=True)
            for k in range(count):
                pixels = generator.integers(0, 100, (40, 50, 3)) + 120 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{k}.JPEG")
    for damaged in ("train/n0/7.JPEG", "val/n1/2.JPEG"):
        path = tmp_path / "net" / damaged
        path.write_bytes(path.read_bytes()[:300])
    words = [
        "train",
        "imagenet-resnet50",
        "--data.folder",
        "net",
        "--data.size",
        "24",
        "--data.workers",
        "2",
        "--model",
        "cnn",
        "--model.width",
        "4",
    ]
    code, out, errors = flock(
        monkeypatch, capsys, *words, *["--members", "2", "--epochs", "6", "--batch", "10", "--out", "run"]
    )
    assert code == 0, errors
    assert re.search(r"Skipped net/train/n0/7.JPEG .*, which cannot be read; 1 in this epoch", out)
    assert re.search(r"Skipped net/val/n1/2.JPEG .* of the test set", out)
    assert re.search(r"Test accuracy 100.00 %", out)


def test_two_processes_cannot_train_one_run(tmp_path):
    run = RunFolder(tmp_path / "run")
    with run.locked(), pytest.raises(ValueError, match="is being trained by another process"), run.locked():
        pass
    with run.locked():  # the lock was released
        pass
