"""featureflock train as a person meets it: help, flags, mistakes, the bar in a terminal, TensorBoard."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import featureflock as ff
from featureflock.cli import train as command
from featureflock.cli.main import COMMANDS, main
from featureflock.methods import FeatureMAP, FeatureWGD, Single
from featureflock.models import CNNConfig, WideResNetConfig
from featureflock.training import RECIPES

FLOCK = Path(sys.executable).with_name("featureflock")


def flock(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command, run in this process."""
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
    """The recipe and the compute that the flags stand for."""
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


def test_parts_are_chosen_by_name_and_keep_their_own_flags(monkeypatch):
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
        *["--model=cnn", "--model.width", "8", "--method.kernel.bandwidth", "official"],
    )
    assert recipe.method == FeatureWGD(ff.Normal(0.5), ff.RBF("official"), rule=ff.SteinWGD(eta=0.1))
    assert recipe.model == CNNConfig(8)
    assert parsed(monkeypatch, "digits", "--method", "feature-map")[0].method == FeatureMAP()
    single, _ = parsed(monkeypatch, "digits", "--method", "single")
    assert single.method == Single()
    assert single.members == 1
    assert parsed(monkeypatch, "digits", "--method", "weight-wgd", "--method", "single")[0].method == Single()
    same, _ = parsed(monkeypatch, "cifar100-wrn16x4", "--method", "feature-wgd")  # its prior is not lost by naming it
    assert same == RECIPES["cifar100-wrn16x4"].recipe


def test_names_list_themselves(monkeypatch, capsys):
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
    assert "225 250" in " ".join(out.replace("│", " ").split())  # that recipe's own defaults


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


def test_a_data_set_that_is_not_here_says_how_to_get_it(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEATUREFLOCK_CACHE", str(tmp_path / "cache"))
    code, _, errors = flock(monkeypatch, capsys, "train", "cifar10-small")
    assert code == 1
    assert "featureflock data get cifar10" in errors
    assert not (tmp_path / "runs").exists()


def test_the_next_command_compares_like_with_like(monkeypatch):
    flags = ["--members", "3", "--method", "feature-wgd", "--method.rank=2", "--decay-epochs", "2", "3", "--resume"]
    flags += ["--out", "a", "--seed", "4"]
    wanted = "featureflock train digits --members 3 --decay-epochs 2 3 --seed 4 --method deep-ensembles"
    assert command._command_with_method("digits", flags, "deep-ensembles") == wanted


# Runs


def test_a_run_tells_its_story_and_tensorboard_shows_it(monkeypatch, capsys, tmp_path):
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


def test_a_terminal_gets_a_live_bar(tmp_path):
    """In a real pseudo-terminal: epoch, step, loss, accuracy, images a second and time left."""
    parent, child = pty.openpty()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
    words = [FLOCK, "train", "digits", "--epochs", "25", "--out", tmp_path / "run"]
    process = subprocess.Popen(words, stdout=child, stderr=child, env=environment, close_fds=True)
    os.close(child)
    seen = b""
    while True:
        try:
            piece = os.read(parent, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not piece:
            break
        seen += piece
    assert process.wait(100) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())
    assert re.search(
        r"epoch \d+/25 step \d+/19 .*loss \d\.\d+ accuracy \d+\.\d %.* [\d,]+ images/s \d+:\d\d:\d\d left", text
    )
    assert "epoch 25/25, learning rate" in text


def test_broken_pictures_are_named_counted_and_survived(monkeypatch, capsys, tmp_path):
    """A real run of the ImageNet recipe on a small tree of JPEGs, two of which are broken, with worker processes."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for part, count in (("train", 20), ("val", 5)):
        for label in range(2):
            folder = tmp_path / "net" / part / f"n{label}"
            folder.mkdir(parents=True)
            for k in range(count):
                pixels = generator.integers(0, 100, (40, 50, 3)) + 120 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{k}.JPEG")
    for broken in ("train/n0/7.JPEG", "val/n1/2.JPEG"):
        path = tmp_path / "net" / broken
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
    assert re.search(r"Left net/val/n1/2.JPEG .* out of the test set", out)
    assert re.search(r"Test: 100.00 % correct", out)


def test_two_processes_cannot_train_one_run(tmp_path):
    from featureflock.training.run_folder import RunFolder

    run = RunFolder(tmp_path / "run")
    with run.locked(), pytest.raises(ValueError, match="is being trained by another process"), run.locked():
        pass
    with run.locked():  # and free again
        pass
