"""Run folders as the evaluation reads and groups them."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from helpers.small_ensembles import SMALL, train_small

import featureflock as ff
from featureflock.core.priors import Cauchy
from featureflock.data import CustomData, Digits
from featureflock.evaluation.runs import differing_fields, group_runs, read_run
from featureflock.methods import DeepEnsembles, FeatureWGD
from featureflock.models import MLPConfig
from featureflock.training import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return train_small(tmp_path_factory.mktemp("runs"), epochs=1)


def test_a_run_is_read(runs):
    run = read_run(runs[2])
    assert (run.method, run.seed, len(run.curves)) == ("feature-WGD", 0, 1)
    assert run.data() == Digits()
    assert run.recipe["model"]["class"] == "CNNConfig"
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(run.load_ensemble().predict(x), ff.load(runs[2] / "ensemble").predict(x))


def test_runs_that_differ_in_their_seed_alone_are_one_group(runs):
    groups = group_runs([read_run(folder) for folder in runs])
    assert [(group.title, [run.seed for run in group.runs]) for group in groups] == [
        ("Deep Ensembles", [0, 1]),
        ("feature-WGD", [0, 1]),
    ]


def pairs(groups):
    return [[(run.seed, run.recipe["split_seed"]) for run in group.runs] for group in groups]


@pytest.fixture(scope="module")
def by_split(tmp_path_factory):
    """Runs by method, seed and split seed."""
    folder, found = tmp_path_factory.mktemp("splits"), {}
    for split in (0, 1, 2):
        for path in train_small(folder / f"{split}", seeds=(0, 1, 2), epochs=1, split_seed=split, subset=100):
            run = read_run(path)
            found[run.method, run.seed, split] = run
    return found


def test_seeds_with_their_own_subsets_are_one_group(by_split):
    """And each is paired with the run of the same seed and subset."""
    runs = [by_split[method, s, s] for method in ("Deep Ensembles", "feature-WGD") for s in (0, 1, 2)]
    groups = group_runs(runs)
    assert [group.title for group in groups] == ["Deep Ensembles", "feature-WGD"]
    assert pairs(groups) == [[(0, 0), (1, 1), (2, 2)]] * 2
    assert differing_fields(groups[0].runs[0], groups[1].runs[2]) == []


def test_other_combinations_of_seeds_and_subsets_are_different_groups(by_split):
    ours = {(seed, split): by_split["feature-WGD", seed, split] for seed in range(3) for split in range(3)}
    one_split = group_runs([ours[s, 1] for s in range(3)])
    assert pairs(one_split) == [[(0, 1), (1, 1), (2, 1)]]
    two = group_runs([ours[seed, split] for split in (0, 1) for seed in range(3)])
    assert pairs(two) == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (1, 1), (2, 1)]]
    assert [group.title for group in two] == ["feature-WGD (split seed 0)", "feature-WGD (split seed 1)"]
    swapped = group_runs([ours[0, 1], ours[1, 0]])
    assert pairs(swapped) == [[(0, 1)], [(1, 0)]]
    fixed = [by_split["Deep Ensembles", s, 0] for s in range(3)]
    mixed = group_runs([*fixed, *(ours[s, s] for s in range(3))])
    assert pairs(mixed) == [[(0, 0), (1, 0), (2, 0)], [(0, 0), (1, 1), (2, 2)]]
    assert differing_fields(mixed[0].runs[0], mixed[1].runs[0]) == ["split_seed"]  # reported beside the differences


def test_the_same_run_with_its_own_subset_twice_is_refused(by_split, tmp_path):
    runs = [by_split["feature-WGD", s, s] for s in (0, 1)]
    shutil.copytree(runs[1].folder.path, tmp_path / "copy")
    with pytest.raises(ValueError, match="have the same recipe and seed"):
        group_runs([*runs, read_run(tmp_path / "copy")])


def test_the_first_members_of_a_run(runs):
    run = read_run(runs[0], 2)
    assert run.recipe["members"] == 2
    assert str(run) == f"{runs[0]}, first 2 members"
    assert str(read_run(runs[0], 3)) == str(runs[0])
    for wrong in (0, 4):
        with pytest.raises(ValueError, match=f"has 3 members, so its first {wrong} cannot be evaluated"):
            read_run(runs[0], wrong)
    groups = group_runs([read_run(runs[0]), run])
    assert [group.title for group in groups] == ["Deep Ensembles (members 3)", "Deep Ensembles (members 2)"]


def test_groups_of_one_method_are_titled_by_the_fields_that_differ(runs, tmp_path):
    other = train_small(tmp_path, [FeatureWGD(prior=Cauchy(0.5))], [0], epochs=1)
    groups = group_runs([read_run(folder) for folder in (*runs, *other)])
    assert [group.title for group in groups] == [
        "Deep Ensembles",
        "feature-WGD (prior precision 0.001)",
        "feature-WGD (prior precision 0.5)",
    ]


def test_the_same_run_twice_is_refused(runs, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(runs[0], copy)
    with pytest.raises(ValueError, match=r"DeepEnsembles-0 and .*copy have the same recipe and seed"):
        group_runs([read_run(runs[0]), read_run(copy)])


def test_folders_without_a_finished_run_are_refused(runs, tmp_path):
    with pytest.raises(ValueError, match="does not exist; give the folder of a run"):
        read_run(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file; give the folder of a run"):
        read_run(tmp_path / "file")
    with pytest.raises(ValueError, match=r"is not a run: it has no recipe\.json"):
        read_run(tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(runs[0], broken)
    index = broken / "ensemble" / "ensemble.json"
    index.write_bytes(index.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"ensemble\.json is damaged: it is not valid JSON"):
        read_run(broken)
    for name in ("result.json", "manifest.json"):
        (broken / name).unlink()
        with pytest.raises(ValueError, match="not finished; resume it by the command that started it, with --resume"):
            read_run(broken)


def test_custom_data_must_be_given(tmp_path):
    x, y = torch.rand(40, 6), torch.arange(40) % 2
    data = CustomData(train=(x, y), test=(x, y))
    recipe = replace(
        SMALL, data=data, model=MLPConfig((8,)), method=DeepEnsembles(), epochs=1, subset=None, validation=0
    )
    train(recipe, tmp_path / "run")
    with pytest.raises(
        ValueError,
        match=r"custom data \(CustomData\).* FEATUREFLOCK_PLUGINS, or .* with data=… instead",
    ):
        read_run(tmp_path / "run").data()


def test_the_input_format_is_stored_with_the_run(runs):
    inputs = json.loads((runs[0] / "inputs.json").read_text())
    assert inputs["shape"] == [1, 8, 8]
    assert inputs["white"] == 16
    assert inputs["class_names"] == list("0123456789")
