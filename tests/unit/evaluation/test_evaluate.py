"""Evaluation of runs, from folders to results: against metrics computed directly from the ensembles."""

import io
import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.small_ensembles import SMALL, train_small
from PIL import Image
from sklearn.metrics import log_loss, roc_auc_score

import featureflock as ff
from featureflock import evaluation as ev
from featureflock.corruptions import corrupt
from featureflock.data import CustomData, Digits
from featureflock.evaluation import METRICS, EvaluationProtocol, EvaluationResults, Metric, evaluate_runs
from featureflock.evaluation.cam_cache import load_maps
from featureflock.evaluation.comparison import notes
from featureflock.evaluation.endpoints import ENDPOINTS
from featureflock.evaluation.images import displayable
from featureflock.evaluation.plan import plan_evaluation
from featureflock.evaluation.predictions import load_predictions
from featureflock.evaluation.runs import read_run
from featureflock.methods import DeepEnsembles, Single
from featureflock.models import MLPConfig
from featureflock.training import train

PROTOCOL = EvaluationProtocol(corruptions=("fog", "contrast"), severities=(1, 4), ood=("noise",), maps=20)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return train_small(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def evaluation(runs):
    return evaluate_runs(runs, PROTOCOL)


@pytest.fixture(scope="module")
def results(evaluation):
    return evaluation.results


@pytest.fixture(scope="module")
def plan(runs):
    return plan_evaluation(runs, PROTOCOL)


@torch.no_grad()
def member_log_probs(folder, x):
    """Of digits with values from 0 to 16."""
    return ff.load(folder / "ensemble").eval()(x.float() / 16).double().log_softmax(-1)


def test_clean_metrics_are_those_of_the_ensemble(runs, results):
    test = Digits().load().test
    for folder, entry in zip(runs, results.runs, strict=True):
        log_p = member_log_probs(folder, test.x)
        p = log_p.exp().mean(0)
        raw = entry.clean.raw
        assert raw["accuracy"] == pytest.approx((p.argmax(-1) == test.labels).double().mean().item())
        assert raw["nll"] == pytest.approx(log_loss(test.labels, p, labels=np.arange(10)), abs=1e-5)
        expected = ev.calibrated(p.log(), test.labels)
        assert entry.clean.calibrated == pytest.approx(expected.scores._asdict(), abs=1e-4)
        assert entry.clean.temperatures == pytest.approx(expected.temperatures, rel=1e-3)
        assert len(entry.clean.temperatures) == 10
        hits = (log_p.argmax(-1) == test.labels).double().mean(-1)
        assert entry.details.member_accuracy == pytest.approx(hits.tolist())
        assert entry.details.diversity == pytest.approx(ev.member_diversity(log_p.exp())._asdict(), abs=1e-5)


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
    summary = results.runs[1].summary
    assert summary["corrupted_nll"] == pytest.approx(np.mean(nlls), abs=1e-3)
    assert summary["corrupted_accuracy"] == pytest.approx(np.mean(accuracies), abs=2e-3)
    assert set(results.runs[1].corrupted) == {"fog", "contrast"}
    assert set(results.runs[1].corrupted["fog"]) == {"1", "4"}


def test_ood_inputs_are_detected_by_their_entropy(plan, results):
    noise = next(s for s in plan.test_sets if s.name == "ood-noise")
    inside, outside = (ev.average(_log_probs(plan.runs[0], s)).exp() for s in (plan.test_sets[0], noise))
    entropy = torch.special.entr(torch.cat([inside, outside])).sum(-1)
    expected = roc_auc_score([0] * len(inside) + [1] * len(outside), entropy)
    assert results.runs[0].ood["noise"]["entropy"]["auroc"] == pytest.approx(expected)
    assert results.runs[0].summary["auroc_noise"] == pytest.approx(expected)


def _log_probs(run, test_set):
    return load_predictions(run, test_set).log_probs


def test_runs_are_named_after_their_folders(runs, results):
    assert [entry.name for entry in results.runs] == [run.name for run in runs]
    assert [name for group in results.groups for name in group.runs] == [run.name for run in runs]


def test_groups_are_means_over_seeds_and_differences_are_paired(results):
    ours, theirs = ([entry.summary["nll"] for entry in results.runs[k : k + 2]] for k in (2, 0))
    base, group = results.groups
    assert (base.title, group.title) == ("Deep Ensembles", "feature-WGD")
    assert group.seeds == [0, 1]
    assert group.metrics["nll"] == pytest.approx((np.mean(ours), np.std(ours, ddof=1), 2))
    assert group.baseline == "Deep Ensembles"
    found = group.differences["nll"]
    assert found.mean == pytest.approx(np.mean(ours) - np.mean(theirs))
    d = np.subtract(ours, theirs)
    assert found.high - found.mean == pytest.approx(12.7062 * d.std(ddof=1) / math.sqrt(2), rel=1e-4)
    assert found.significant is None  # two seeds
    assert base.differences == {}


def test_arrays_of_predictions_give_the_same_results_as_their_runs(plan, results):
    """On the clean, corrupted and OOD test sets; only the class activation maps need the networks."""
    names = {"corrupted": lambda label: "corrupted/" + "/".join(label.rsplit("-", 1)), "ood": "ood/{}".format}
    methods: dict = {}
    for run in plan.runs:
        arrays = {"logits": _log_probs(run, plan.test_sets[0]).numpy()}
        for test_set in plan.test_sets[1:]:
            arrays[names[test_set.kind](test_set.label)] = _log_probs(run, test_set).numpy()
        methods.setdefault(run.method, {})[run.seed] = arrays
    found = ff.evaluate(methods, plan.splits.test.labels)
    for ours, theirs in zip(found.groups, results.groups, strict=True):
        assert (ours.title, ours.seeds, ours.members) == (theirs.title, theirs.seeds, theirs.members)
        assert {*theirs.metrics} - {*ours.metrics} <= {"map_similarity", "corrupted_map_similarity"}
        for key, value in ours.metrics.items():
            assert value == pytest.approx(theirs.metrics[key], abs=1e-6), key
        assert ours.baseline == theirs.baseline
        for key, difference in ours.differences.items():
            assert difference[:3] == pytest.approx(theirs.differences[key][:3], abs=1e-5), key
        assert ours.deep_ensemble_equivalent == pytest.approx(theirs.deep_ensemble_equivalent, abs=1e-3)
    assert [(s.name, s.kind, s.examples) for s in found.test_sets] == [
        (s.name, s.kind, s.examples) for s in results.test_sets
    ]
    assert [example.position for example in found.disputed] == [example.position for example in results.disputed]
    assert found.notes == [note for note in results.notes if note in found.notes]


def test_curve_by_size_ends_with_all_members_and_begins_with_single_ones(plan, results):
    entry = results.runs[0]
    sizes = entry.details.by_size
    assert list(sizes) == ["1", "2", "3"]
    assert sizes["3"] == pytest.approx(entry.clean.calibrated)
    log_p = _log_probs(plan.runs[0], plan.test_sets[0])
    y = plan.splits.test.labels
    alone = [ev.calibrated(ev.average(one[None]), y).scores.nll for one in log_p]
    assert sizes["1"]["nll"] == pytest.approx(np.mean(alone))
    pairs = [ev.calibrated(ev.average(log_p[[i, (i + 1) % 3]]), y).scores.nll for i in range(3)]
    assert sizes["2"]["nll"] == pytest.approx(np.mean(pairs))


def test_reliability_before_and_after_temperature_scaling(plan, results):
    log_p = ev.average(_log_probs(plan.runs[0], plan.test_sets[0]))
    y, details = plan.splits.test.labels, results.runs[0].details
    assert details.temperature == pytest.approx(ev.fit_temperature(log_p, y))
    for kind, p in (("raw", log_p.exp()), ("calibrated", (log_p / details.temperature).softmax(-1))):
        expected, found = ev.reliability(p, y), details.reliability[kind]
        assert found.count == expected.count.tolist()
        for name in ("confidence", "accuracy"):
            values = [math.nan if x is None else x for x in getattr(found, name)]
            assert values == pytest.approx(getattr(expected, name).tolist(), nan_ok=True)
    curve, places = ev.risk_coverage(log_p.exp(), y), details.risk_coverage
    assert (places["coverage"][0], places["coverage"][-1]) == pytest.approx((1 / 597, 1))
    assert places["risk"][-1] == pytest.approx(curve.risk[-1].item())
    assert len(places["risk"]) == 50


def test_deep_ensembles_are_worth_themselves(results):
    base, other = results.groups
    assert base.deep_ensemble_equivalent == pytest.approx(3)
    worth = other.deep_ensemble_equivalent
    better = other.metrics["nll"].mean < base.metrics["nll"].mean
    assert worth == "more than 3" if better else worth < 3


def test_maps_of_all_members_are_compared(plan, results):
    run = plan.runs[3]
    cached = load_maps(run, "clean", plan.mapped["clean"])
    assert cached.maps.shape[:2] == (3, 20)
    entry = results.runs[3]
    assert entry.maps["clean"].similarity == pytest.approx(ev.cam_similarity(cached.maps))
    assert (entry.maps["clean"].images, entry.maps["corrupted"].images) == (20, 20)
    assert entry.summary["map_similarity"] == entry.maps["clean"].similarity
    image = plan.splits.test.select(cached.positions[4:5])
    (batch,) = image.batches([torch.arange(1)], torch.device("cpu"))
    again = ev.class_activation_maps(ff.load(run.folder.ensemble), batch.x)
    torch.testing.assert_close(cached.maps[:, 4:5], again.maps, atol=1e-4, rtol=1e-3)
    assert torch.equal(cached.classes[:, 4:5], again.classes)


def test_cached_maps_are_valid_for_their_images_only(plan):
    run, (clean,) = plan.runs[0], plan.mapped["clean"]
    assert load_maps(run, "clean", [clean]) is not None
    assert load_maps(run, "clean", [replace(clean, positions=clean.positions + 1)]) is None
    assert load_maps(run, "clean", [replace(clean, identity="another")]) is None


def test_nothing_is_computed_twice(runs, results, monkeypatch):
    monkeypatch.setattr("featureflock.evaluation.predictions.predict", None)
    monkeypatch.setattr("featureflock.evaluation.cam_cache.store_maps", None)
    again = evaluate_runs(runs, PROTOCOL).results
    assert again.runs == results.runs
    assert again.groups == results.groups


def test_an_interrupted_evaluation_resumes(runs, results, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs[0], folder, ignore=shutil.ignore_patterns("predictions"))
    seen = []

    def stop_at_the_third(done, total, what):
        seen.append(what)
        if len(set(seen)) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="stopped; 2 of 8 tasks are cached"):
        evaluate_runs([folder], PROTOCOL, progress=stop_at_the_third)
    first = {path.name: path.stat().st_mtime_ns for path in (folder / "predictions").iterdir()}
    assert len(first) == 2
    counts = []
    again = evaluate_runs([folder], PROTOCOL, progress=lambda done, total, what: counts.append((done, total)))
    assert again.results.runs[0].summary == pytest.approx(results.runs[0].summary, rel=1e-6)
    assert {name: (folder / "predictions" / name).stat().st_mtime_ns for name in first} == first
    assert counts[0][0] == 0
    assert counts[-1][0] == counts[-1][1]


def test_notes_name_the_source_of_the_corruptions(results):
    assert results.notes == ["Corrupted images: generated with seed 0."]


def test_results_are_json_without_paths(results, tmp_path_factory):
    text = json.dumps(results.to_json(), allow_nan=False)
    assert str(tmp_path_factory.getbasetemp()) not in text
    assert results.runs[0].recipe["seed"] == 0
    assert results.provenance["machine"]["cores"]
    assert EvaluationResults.from_json(json.loads(text)) == results
    assert json.dumps(EvaluationResults.from_json(json.loads(text)).to_json()) == text  # as a report writes it


def test_the_deep_ensembles_that_share_seeds_and_recipe_are_compared_with(runs, tmp_path):
    """In any order; the deep-ensemble equivalent is measured against the largest."""
    apart = train_small(tmp_path / "apart", [DeepEnsembles()], [7], members=2)
    longer = train_small(tmp_path / "longer", [DeepEnsembles()], [0, 1], epochs=4)
    few = replace(PROTOCOL, corruptions=(), ood=(), maps=0)
    results = evaluate_runs([*apart, *longer, *runs], few).results
    (group,) = [group for group in results.groups if group.differences]
    assert group.baseline == "Deep Ensembles (members 3, epochs 3)"
    assert group.baseline_differs_in == []
    assert group.differences["nll"].seeds == 2
    without = evaluate_runs([*apart, *longer, *runs[2:]], few).results.groups[-1]
    assert without.baseline == "Deep Ensembles (members 3, epochs 4)"
    assert without.baseline_differs_in == ["epochs"]
    alone = evaluate_runs([*apart, *runs[2:]], few).results
    assert alone.groups[-1].differences == {}
    assert "No Deep Ensembles share a seed" in alone.notes[-1]


def test_runs_of_equal_folder_names_are_told_apart(runs, tmp_path):
    for k, folder in enumerate(runs[:2]):
        shutil.copytree(folder, tmp_path / f"m{k}" / "run")
    few = replace(PROTOCOL, corruptions=(), ood=(), maps=0)
    results = evaluate_runs([tmp_path / "m0" / "run", tmp_path / "m1" / "run"], few).results
    assert [entry.name for entry in results.runs] == ["m0/run", "m1/run"]
    assert results.groups[0].runs == ["m0/run", "m1/run"]


def test_temperatures_at_their_bound_are_flagged(results):
    def with_temperatures(clean, fog):
        run = results.runs[0]
        sets = {"fog": {"1": replace(run.corrupted["fog"]["1"], temperatures=fog)}}
        return replace(run, clean=replace(run.clean, examples=9, temperatures=clean), corrupted=sets)

    run = with_temperatures([1.0, 0.01], [2.0])
    assert (run.temperature_at_bound(), run.temperature_at_bound("corrupted_nll")) == (True, False)
    (note,) = notes([run], [], requested=9)
    assert note.startswith("On 1 of 2 test sets of all runs, a fitted temperature is at its bound, 0.01 or 100")
    run = with_temperatures([1.0, 0.011], [100.0])
    assert (run.temperature_at_bound(), run.temperature_at_bound("corrupted_nll")) == (False, True)
    run = with_temperatures([1.0, 0.011], [2.0])
    assert notes([run], [], requested=9) == []
    assert notes([run], [], requested=11) == ["2 of 11 test examples cannot be read and are left out."]


def test_a_registered_metric_is_summarised_averaged_and_compared(runs, monkeypatch):
    """One entry is all that a new metric needs."""

    def top2(run):
        return (
            (run.clean.log_probs.exp().mean(0).topk(2).indices == run.clean.labels[:, None])
            .any(1)
            .double()
            .mean()
            .item()
        )

    monkeypatch.setitem(METRICS, "top2", Metric("top2", "Top-2, %", "higher", "percent:2", top2))
    results = evaluate_runs(runs, replace(PROTOCOL, corruptions=(), ood=(), maps=0)).results
    assert all(run.summary["accuracy"] < run.summary["top2"] <= 1 for run in results.runs)
    assert results.groups[1].metrics["top2"].seeds == 2
    assert "top2" in results.groups[1].differences


def test_disputed_examples_are_those_with_the_largest_mutual_information(evaluation, plan):
    first = [plan.runs[0], plan.runs[2]]
    probs = [_log_probs(run, plan.test_sets[0]).double().exp() for run in first]
    information = torch.stack([ev.mutual_information(p) for p in probs]).mean(0)
    disputed = [example for example in evaluation.results.disputed if example.kind == "clean"]
    assert [example.position for example in disputed] == information.topk(6).indices.tolist()
    assert disputed[0].mutual_information == pytest.approx(information.max().item())
    assert disputed[0].label == plan.splits.test.labels[disputed[0].position]
    classes, tops = zip(*disputed[0].predictions["feature-WGD"], strict=True)
    assert list(classes) == probs[1][:, disputed[0].position].argmax(-1).tolist()
    assert list(tops) == pytest.approx(probs[1][:, disputed[0].position].amax(-1).tolist())
    image = Image.open(io.BytesIO(evaluation.images[disputed[0].image]))
    pixels = plan.splits.test.x[disputed[0].position, 0].float() * 255 / 16
    assert np.allclose(np.asarray(image)[..., 0], pixels, atol=0.51)


def test_disputed_examples_of_corrupted_and_ood_sets_come_with_the_images_that_were_predicted(evaluation, plan):
    sets = {(test_set.kind, test_set.label): test_set for test_set in plan.test_sets}
    others = [example for example in evaluation.results.disputed if example.kind != "clean"]
    assert [example.kind for example in others] == ["corrupted"] * 6 + ["ood"] * 6
    assert len({example.test_set for example in others[:4]}) == 4
    assert len({example.position for example in others[:6]}) == 6
    for example in (others[0], others[6]):
        test_set = sets[example.kind, example.test_set]
        probs = [_log_probs(run, test_set).double().exp() for run in (plan.runs[0], plan.runs[2])]
        information = torch.stack([ev.mutual_information(p) for p in probs]).mean(0)
        assert example.mutual_information == pytest.approx(information.max().item())
        assert example.position == test_set.positions[information.argmax()]
        shown = Image.open(io.BytesIO(evaluation.images[example.image]))
        assert np.array_equal(np.asarray(shown), displayable(test_set.load(torch.tensor([example.position])))[0])


def test_the_endpoints_of_the_task_are_corrected_by_default(results):
    assert results.endpoints == list(ENDPOINTS["classification"])
    for key, difference in results.groups[1].differences.items():
        assert (difference.p_holm is not None) == (key in results.endpoints and difference.p is not None), key


def test_every_image_of_the_results_is_there(evaluation):
    results = evaluation.results
    assert set(evaluation.images) == {*(example.image for example in results.disputed), results.cam_figure.image}
    assert results.cam_figure.groups == ["Deep Ensembles", "feature-WGD"]
    assert results.cam_figure.labels == [0, 1, 2, 3, 4, 5]
    assert results.cam_figure.members_shown == 3


def test_one_network_by_itself(tmp_path):
    folders = train_small(tmp_path, [Single()], [0], members=1, epochs=1)
    results = evaluate_runs(folders, replace(PROTOCOL, corruptions=(), ood=())).results
    (entry,), (group,) = results.runs, results.groups
    assert (entry.details.diversity, entry.maps, entry.corrupted) == ({}, {}, {})
    assert "disagreement" not in entry.summary
    assert group.differences == {}
    assert group.metrics["nll"].sd is None
    assert results.disputed == []
    assert results.cam_figure is None
    json.dumps(results.to_json(), allow_nan=False)


def test_networks_without_convolutions_have_no_maps(tmp_path):
    train(replace(SMALL, model=MLPConfig((8,)), epochs=1), tmp_path / "run")
    evaluation = evaluate_runs([tmp_path / "run"], replace(PROTOCOL, corruptions=()))
    assert evaluation.results.runs[0].maps == {}
    assert evaluation.results.cam_figure is None


def test_custom_data(tmp_path):
    g = torch.Generator().manual_seed(0)
    x, y = torch.rand(60, 6, generator=g), torch.arange(60) % 2
    data = CustomData(train=(x, y), test=(x, y))
    train(replace(SMALL, data=data, model=MLPConfig((8,)), epochs=1, subset=None, validation=0), tmp_path / "run")
    results = evaluate_runs([tmp_path / "run"], data=data).results
    assert [test_set.name for test_set in results.test_sets] == ["clean"]
    with pytest.raises(ValueError, match="custom data"):
        evaluate_runs([tmp_path / "run"])


def test_runs_of_other_data_are_not_compared(runs, tmp_path):
    recipe = replace(SMALL, data=Digits(views=2), method=DeepEnsembles(), epochs=1)
    train(recipe, tmp_path / "run")
    with pytest.raises(ValueError, match=r"have different test sets \(data.views is 1 instead of 2\); evaluate them"):
        evaluate_runs([runs[0], tmp_path / "run"], PROTOCOL)


def test_the_first_run_names_the_folder_that_is_missing(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        evaluate_runs([tmp_path / "nothing"])
    with pytest.raises(ValueError, match="at least one run"):
        evaluate_runs([])


def test_a_validation_set_is_not_tested_on(runs):
    """The examples held out of training are not among those that are scored."""
    assert "validation" not in [path.stem for path in (runs[0] / "predictions").iterdir()]
    assert read_run(runs[0]).recipe["validation"] == 100


def test_the_first_members_are_evaluated_as_if_they_had_been_trained_alone(runs, tmp_path):
    """On every test set; and a row is compared with the Deep Ensembles of its size."""
    small = train_small(tmp_path, members=2, seeds=[0])
    results = evaluate_runs([runs[0], runs[0], runs[2], small[1]], PROTOCOL, sizes=(3, 2, 3, 2)).results
    alone = evaluate_runs([small[0]], PROTOCOL).results.runs[0]
    part = results.runs[1]
    assert part.name.endswith(f"{runs[0].name}, first 2 members")
    assert part.members == 2
    comparable = {key: value for key, value in alone.summary.items() if "map" not in key}
    for key, value in comparable.items():
        assert part.summary[key] == pytest.approx(value, abs=1e-5), key
    assert part.summary["map_similarity"] != results.runs[0].summary["map_similarity"]
    by_title = {group.title: group for group in results.groups}
    assert by_title["feature-WGD (members 2)"].baseline == "Deep Ensembles (members 2)"
    assert by_title["feature-WGD (members 3)"].baseline == "Deep Ensembles (members 3)"


def test_endpoints_are_corrected(tmp_path):
    folders = train_small(tmp_path, seeds=(0, 1, 2), epochs=1)
    protocol = EvaluationProtocol(corruptions=(), ood=(), maps=0)
    plain, corrected = (
        evaluate_runs(folders, protocol, endpoints=keys).results.groups[1].differences
        for keys in ((), ("nll", "brier"))
    )
    assert corrected["ece"] == plain["ece"]
    assert plain["nll"].p_holm is None
    smaller, larger = sorted([plain["nll"].p, plain["brier"].p])
    expected = {smaller: min(1, 2 * smaller), larger: max(min(1, 2 * smaller), larger)}
    for key in ("nll", "brier"):
        assert corrected[key].p_holm == pytest.approx(expected[plain[key].p])
        assert corrected[key]._replace(p_holm=None) == plain[key]
