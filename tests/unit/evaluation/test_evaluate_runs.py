"""Evaluation of runs, from folders to results: against metrics computed by hand from the ensembles themselves."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.small_ensembles import SMALL, train_small
from sklearn.metrics import log_loss, roc_auc_score

import featureflock as ff
from featureflock import evaluation as ev
from featureflock.corruptions import corrupt
from featureflock.data import CustomData, Digits
from featureflock.evaluation import EvaluationProtocol, evaluate
from featureflock.evaluation.cam_cache import read_maps
from featureflock.evaluation.run_metrics import remarks
from featureflock.evaluation.runs import read_run
from featureflock.methods import DeepEnsembles, Single
from featureflock.models import MLPConfig
from featureflock.training import train

PROTOCOL = EvaluationProtocol(corruptions=("fog", "contrast"), severities=(1, 4), unfamiliar=("noise",), maps=20)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return train_small(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def evaluation(runs):
    return evaluate(runs, PROTOCOL)


@pytest.fixture(scope="module")
def results(evaluation):
    return evaluation.results


@torch.no_grad()
def member_log_probs(folder, x):
    """Of digits in units of their own, 0 to 16."""
    return ff.load(folder / "ensemble").eval()(x.float() / 16).double().log_softmax(-1)


def test_clean_metrics_are_those_of_the_ensemble(runs, results):
    test = Digits().load().test
    for folder, entry in zip(runs, results["runs"], strict=True):
        log_p = member_log_probs(folder, test.x)
        p = log_p.exp().mean(0)
        raw = entry["clean"]["raw"]
        assert raw["accuracy"] == pytest.approx((p.argmax(-1) == test.labels).double().mean().item())
        assert raw["nll"] == pytest.approx(log_loss(test.labels, p, labels=np.arange(10)), abs=1e-5)
        expected = ev.calibrated(p.log(), test.labels)
        assert entry["clean"]["calibrated"] == pytest.approx(expected.scores._asdict(), abs=1e-4)
        assert entry["clean"]["temperatures"] == pytest.approx(expected.temperatures, rel=1e-3)
        assert len(entry["clean"]["temperatures"]) == 10
        hits = (log_p.argmax(-1) == test.labels).double().mean(-1)
        assert entry["clean"]["member_accuracy"] == pytest.approx(hits.tolist())
        assert entry["clean"]["diversity"] == pytest.approx(ev.member_diversity(log_p.exp())._asdict(), abs=1e-5)


def test_corrupted_metrics_are_means_over_all_corrupted_sets(runs, results):
    test = Digits().load().test
    rgb = np.rint(test.x.numpy().transpose(0, 2, 3, 1).repeat(3, 3) * np.float32(255 / 16)).astype(np.uint8)
    large = rgb.repeat(4, 1).repeat(4, 2)
    nlls, accuracies = [], []
    for corruption in ("fog", "contrast"):
        for severity in (1, 4):
            bad = corrupt(large, corruption, severity, seed=0, indices=np.arange(len(large)))[..., 1]
            x = torch.from_numpy(bad.reshape(-1, 8, 4, 8, 4).mean((2, 4)) * 16 / 255).float()[:, None]
            p = member_log_probs(runs[1], x).exp().mean(0)
            found = ev.calibrated(p.log(), test.labels).scores
            nlls.append(found.nll)
            accuracies.append((p.argmax(-1) == test.labels).double().mean().item())
    summary = results["runs"][1]["summary"]
    assert summary["corrupted_nll"] == pytest.approx(np.mean(nlls), abs=1e-3)
    assert summary["corrupted_accuracy"] == pytest.approx(np.mean(accuracies), abs=2e-3)
    assert set(results["runs"][1]["corrupted"]) == {"fog", "contrast"}
    assert set(results["runs"][1]["corrupted"]["fog"]) == {"1", "4"}


def test_unfamiliar_inputs_are_told_by_their_entropy(evaluation, results):
    run = evaluation.settings[0].runs[0]
    noise = next(c for c in evaluation.conditions if c.name == "unfamiliar-noise")
    inside, outside = (ev.average(_read(run, c)).exp() for c in (evaluation.conditions[0], noise))
    entropy = torch.special.entr(torch.cat([inside, outside])).sum(-1)
    expected = roc_auc_score([0] * len(inside) + [1] * len(outside), entropy)
    assert results["runs"][0]["unfamiliar"]["noise"]["entropy"]["auroc"] == pytest.approx(expected)
    assert results["runs"][0]["summary"]["auroc_noise"] == pytest.approx(expected)


def _read(run, condition):
    from featureflock.evaluation.predictions import read

    return read(run, condition).log_probs


def test_runs_are_called_by_their_folders(runs, results):
    assert [entry["folder"] for entry in results["runs"]] == [run.name for run in runs]
    assert [name for setting in results["settings"] for name in setting["runs"]] == [run.name for run in runs]


def test_settings_are_means_over_seeds_and_differences_are_paired(results):
    ours, theirs = ([entry["summary"]["nll"] for entry in results["runs"][k : k + 2]] for k in (2, 0))
    base, setting = results["settings"]
    assert (base["title"], setting["title"]) == ("Deep Ensembles", "feature-WGD")
    assert setting["seeds"] == [0, 1]
    assert setting["metrics"]["nll"] == pytest.approx({"mean": np.mean(ours), "sd": np.std(ours, ddof=1), "seeds": 2})
    assert setting["against"] == "Deep Ensembles"
    found = setting["differences"]["nll"]
    assert found["mean"] == pytest.approx(np.mean(ours) - np.mean(theirs))
    d = np.subtract(ours, theirs)
    assert found["high"] - found["mean"] == pytest.approx(12.7062 * d.std(ddof=1) / math.sqrt(2), rel=1e-4)
    assert "differences" not in base


def test_curve_by_size_ends_with_the_whole_ensemble_and_begins_with_single_members(evaluation, results):
    entry = results["runs"][0]
    sizes = entry["clean"]["by_size"]
    assert list(sizes) == ["1", "2", "3"]
    assert sizes["3"] == pytest.approx(entry["clean"]["calibrated"])
    log_p = _read(evaluation.settings[0].runs[0], evaluation.conditions[0])
    y = evaluation.splits.test.labels
    alone = [ev.calibrated(ev.average(one[None]), y).scores.nll for one in log_p]
    assert sizes["1"]["nll"] == pytest.approx(np.mean(alone))
    pairs = [ev.calibrated(ev.average(log_p[[i, (i + 1) % 3]]), y).scores.nll for i in range(3)]
    assert sizes["2"]["nll"] == pytest.approx(np.mean(pairs))


def test_reliability_is_that_before_and_after_the_one_temperature(evaluation, results):
    log_p = ev.average(_read(evaluation.settings[0].runs[0], evaluation.conditions[0]))
    y, clean = evaluation.splits.test.labels, results["runs"][0]["clean"]
    assert clean["temperature"] == pytest.approx(ev.fit_temperature(log_p, y))
    for kind, p in (("raw", log_p.exp()), ("calibrated", (log_p / clean["temperature"]).softmax(-1))):
        expected, found = ev.reliability(p, y), clean["reliability"][kind]
        assert found["count"] == expected.count.tolist()
        for name in ("confidence", "accuracy"):
            values = [math.nan if x is None else x for x in found[name]]
            assert values == pytest.approx(getattr(expected, name).tolist(), nan_ok=True)
    curve, places = ev.risk_coverage(log_p.exp(), y), clean["risk_coverage"]
    assert (places["coverage"][0], places["coverage"][-1]) == pytest.approx((1 / 597, 1))
    assert places["risk"][-1] == pytest.approx(curve.risk[-1].item())
    assert len(places["risk"]) == 50


def test_deep_ensembles_are_worth_themselves(results):
    base, other = results["settings"]
    assert base["deep_ensemble_equivalent"] == pytest.approx(3)
    worth = other["deep_ensemble_equivalent"]
    better = other["metrics"]["nll"]["mean"] < base["metrics"]["nll"]["mean"]
    assert worth == "more than 3" if better else worth < 3


def test_maps_of_all_members_are_compared(evaluation, results):
    run = evaluation.settings[1].runs[1]
    kept = evaluation.maps(run)
    assert kept.maps.shape[:2] == (3, 20)
    entry = results["runs"][3]
    assert entry["maps"]["clean"]["similarity"] == pytest.approx(ev.cam_similarity(kept.maps))
    assert entry["maps"]["clean"]["pictures"] == 20
    assert entry["maps"]["corrupted"]["pictures"] == 20
    assert entry["summary"]["map_similarity"] == entry["maps"]["clean"]["similarity"]
    picture = evaluation.splits.test.select(kept.positions[4:5])
    (batch,) = picture.batches([torch.arange(1)], torch.device("cpu"))
    again = ev.class_activation_maps(ff.load(run.folder.ensemble), batch.x)
    torch.testing.assert_close(kept.maps[:, 4:5], again.maps, atol=1e-4, rtol=1e-3)
    assert torch.equal(kept.classes[:, 4:5], again.classes)


def test_maps_of_other_pictures_are_not_taken_for_these(evaluation):
    run, (clean,) = evaluation.settings[0].runs[0], evaluation.mapped["clean"]
    assert read_maps(run, "clean", [clean]) is not None
    assert read_maps(run, "clean", [replace(clean, positions=clean.positions + 1)]) is None
    assert read_maps(run, "clean", [replace(clean, identity="another")]) is None


def test_nothing_is_computed_twice(runs, results, monkeypatch):
    monkeypatch.setattr("featureflock.evaluation.evaluate_runs.predict", None)
    monkeypatch.setattr("featureflock.evaluation.evaluate_runs.map_pictures", None)
    again = evaluate(runs, PROTOCOL).results
    assert again["runs"] == results["runs"]
    assert again["settings"] == results["settings"]


def test_an_interrupted_evaluation_goes_on(runs, results, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs[0], folder, ignore=shutil.ignore_patterns("predictions"))
    seen = []

    def stop_at_the_third(done, total, what):
        seen.append(what)
        if len(set(seen)) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="stopped; 2 of 8 pieces of work are kept"):
        evaluate([folder], PROTOCOL, progress=stop_at_the_third)
    first = {path.name: path.stat().st_mtime_ns for path in (folder / "predictions").iterdir()}
    assert len(first) == 2
    counts = []
    again = evaluate([folder], PROTOCOL, progress=lambda done, total, what: counts.append((done, total)))
    assert again.results["runs"][0]["summary"] == pytest.approx(results["runs"][0]["summary"], rel=1e-6)
    assert {name: (folder / "predictions" / name).stat().st_mtime_ns for name in first} == first
    assert counts[0][0] == 0
    assert counts[-1][0] == counts[-1][1]


def test_results_say_where_the_corruptions_come_from(results):
    assert results["notes"] == ["Corrupted pictures: made with seed 0."]


def test_results_are_json_without_paths(results, tmp_path_factory):
    text = json.dumps(results, allow_nan=False)
    assert str(tmp_path_factory.getbasetemp()) not in text
    assert results["runs"][0]["recipe"]["seed"] == 0
    assert results["provenance"]["machine"]["cores"]


def test_the_deep_ensembles_that_share_seeds_and_recipe_are_compared_with(runs, tmp_path):
    """Whatever the order; and the largest tell what a setting is worth."""
    apart = train_small(tmp_path / "apart", [DeepEnsembles()], [7], members=2)
    longer = train_small(tmp_path / "longer", [DeepEnsembles()], [0, 1], epochs=4)
    few = replace(PROTOCOL, corruptions=(), unfamiliar=(), maps=0)
    results = evaluate([*apart, *longer, *runs], few).results
    titles = {s["title"].split(" (")[0]: s for s in results["settings"] if "differences" in s}
    (setting,) = titles.values()
    assert setting["against"] == "Deep Ensembles (members 3, epochs 3)"
    assert setting["otherwise_differing"] == []
    assert setting["differences"]["nll"]["seeds"] == 2
    without = evaluate([*apart, *longer, *runs[2:]], few).results["settings"][-1]
    assert without["against"] == "Deep Ensembles (members 3, epochs 4)"
    assert without["otherwise_differing"] == ["epochs"]
    alone = evaluate([*apart, *runs[2:]], few).results
    assert alone["settings"][-1]["differences"] == {}
    assert "no Deep Ensembles that share a seed" in alone["notes"][-1]


def test_runs_of_equal_folder_names_are_told_apart(runs, tmp_path):
    for k, folder in enumerate(runs[:2]):
        shutil.copytree(folder, tmp_path / f"m{k}" / "run")
    few = replace(PROTOCOL, corruptions=(), unfamiliar=(), maps=0)
    results = evaluate([tmp_path / "m0" / "run", tmp_path / "m1" / "run"], few).results
    assert [entry["folder"] for entry in results["runs"]] == ["m0/run", "m1/run"]
    assert results["settings"][0]["runs"] == ["m0/run", "m1/run"]


def test_temperatures_at_their_bound_are_remarked_upon():
    entry = {
        "clean": {"examples": 9, "temperatures": [1.0, 0.01]},
        "corrupted": {"fog": {"1": {"temperatures": [2.0]}}},
    }
    (remark,) = remarks([entry], asked=9)
    assert remark.startswith("On 1 of 2 test sets of all runs some half was predicted so well")
    entry["clean"]["temperatures"] = [1.0, 0.011]
    assert remarks([entry], asked=9) == []
    assert remarks([entry], asked=11) == ["2 of 11 test examples cannot be read and are left out."]


def test_one_network_by_itself(tmp_path):
    folders = train_small(tmp_path, [Single()], [0], members=1, epochs=1)
    results = evaluate(folders, replace(PROTOCOL, corruptions=(), unfamiliar=())).results
    (entry,), (setting,) = results["runs"], results["settings"]
    assert "diversity" not in entry["clean"]
    assert "maps" not in entry
    assert "corrupted" not in entry
    assert "differences" not in setting
    assert setting["metrics"]["nll"]["sd"] is None
    json.dumps(results, allow_nan=False)


def test_networks_without_convolutions_have_no_maps(tmp_path):
    train(replace(SMALL, model=MLPConfig((8,)), epochs=1), tmp_path / "run")
    evaluation = evaluate([tmp_path / "run"], replace(PROTOCOL, corruptions=()))
    assert "maps" not in evaluation.results["runs"][0]
    assert evaluation.maps(evaluation.settings[0].runs[0]) is None


def test_data_of_ones_own(tmp_path):
    g = torch.Generator().manual_seed(0)
    x, y = torch.rand(60, 6, generator=g), torch.arange(60) % 2
    data = CustomData(train=(x, y), test=(x, y))
    train(replace(SMALL, data=data, model=MLPConfig((8,)), epochs=1, subset=None, validation=0), tmp_path / "run")
    results = evaluate([tmp_path / "run"], data=data).results
    assert results["conditions"] == ["clean"]
    with pytest.raises(ValueError, match="trained on custom data"):
        evaluate([tmp_path / "run"])


def test_runs_of_other_data_are_not_compared(runs, tmp_path):
    recipe = replace(SMALL, data=Digits(views=2), method=DeepEnsembles(), epochs=1)
    train(recipe, tmp_path / "run")
    with pytest.raises(
        ValueError, match=r"have different test sets \(data.views is 1 instead of 2\); evaluate them separately"
    ):
        evaluate([runs[0], tmp_path / "run"], PROTOCOL)


def test_the_first_run_names_the_folder_that_is_missing(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        evaluate([tmp_path / "nothing"])
    with pytest.raises(ValueError, match="at least one run"):
        evaluate([])


def test_a_validation_set_is_not_tested_on(runs):
    """The examples held out of training are not among those that are scored."""
    assert "validation" not in [path.stem for path in (runs[0] / "predictions").iterdir()]
    assert read_run(runs[0]).recipe["validation"] == 100
