"""The command tune: equal budgets for methods, tables, the command that trains the best setting, and mistakes."""

import json

import pytest

from featureflock.cli.tune import main

QUICK = ["digits-cnn", "--members", "2", "--epochs", "1", "--subset", "100", "--held-out", "50"]


def test_methods_get_the_same_budget_and_are_compared_by_seed(tmp_path, capsys):
    main(
        [*QUICK, "--methods", "feature-wgd", "deep-ensembles", "--budget", "4", "--seeds", "2", "--out", str(tmp_path)]
    )
    found = json.loads((tmp_path / "tune-digits-cnn.json").read_text())
    assert [each["method"] for each in found["methods"]] == ["feature-WGD", "Deep Ensembles"]
    for each in found["methods"]:
        assert sum(len(candidate["seeds"]) for candidate in each["candidates"]) == 4
    ours, theirs = (each["candidates"][0]["seeds"] for each in found["methods"])
    assert list(ours) == list(theirs) == ["100", "101"]
    printed = " ".join(capsys.readouterr().out.split())
    difference = sum(ours[s]["accuracy"] - theirs[s]["accuracy"] for s in ours) / 2
    assert f"{100 * difference:+.2f}".replace("-", "−") in (tmp_path / "tune-digits-cnn.md").read_text()
    assert "difference vs Deep Ensembles" in (tmp_path / "tune-digits-cnn.md").read_text()
    best = found["methods"][1]["candidates"][0]["values"]
    flags = f"--learning-rate {best['learning_rate']} --weight-decay {best['weight_decay']}"
    head = "featureflock train digits-cnn --members 2 --epochs 1 --subset 100 --method deep-ensembles"
    assert f"{head} {flags}" in printed


def test_the_space_is_that_of_the_flags(tmp_path, capsys):
    space = ["--space", "method.repulsion=2,8", "--method.rank", "1", "--seeds", "1"]
    main([*QUICK, *space, "--out", str(tmp_path)])
    (method,) = json.loads((tmp_path / "tune-digits-cnn.json").read_text())["methods"]
    tried = {candidate["values"]["method.repulsion"] for candidate in method["candidates"]}
    assert tried == {5.0, 2, 8}  # and the recipe's own value
    best = method["candidates"][0]["values"]["method.repulsion"]
    printed = " ".join(capsys.readouterr().out.split())
    command = "featureflock train digits-cnn --members 2 --epochs 1 --subset 100 --method.rank 1"
    assert f"{command} --method.repulsion {best}" in printed


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["digit"], "digits"),
        (["--budget", "3"], "recipe comes first"),
        ([*QUICK, "--by", "nil"], "did you mean nll"),
        ([*QUICK, "--by", "auroc_{}"], "in place of {}, as in auroc_noise"),
        ([*QUICK, "--by", "auroc_noise"], "not evaluated on OOD sets"),
        ([*QUICK, "--by", "disagreement"], "cannot rank candidates; choose one of mean_iou, accuracy, nll"),
        ([*QUICK, "--space", "method.repulsion"], "such as method.repulsion=1,5,10"),
        ([*QUICK, "--space", "method.repulsion=1,x"], "repulsion must be a finite number"),
        ([*QUICK, "--space", "method.prior.precision=-1"], "precision"),
        ([*QUICK, "--method", "adp", "--space", "method.repulsion=3"], "no field 'method.repulsion' to tune"),
        ([*QUICK, "--methods", "deep-ensemble"], "did you mean deep-ensembles"),
        ([*QUICK, "--seeds", "0"], "seeds must be at least 1"),
        ([*QUICK, "--budget", "2"], "budget at least seeds"),
        ([*QUICK, "--workers", "0"], "--workers must be at least 1"),
        ([*QUICK, "--split-seed", "1"], "leave --split-seed out"),
        ([*QUICK, "--accuracy-tolerance", "-1"], "at least 0 points"),
        (["digits-cnn", "--held-out", "1200"], "0 to 1199"),
    ],
)
def test_mistakes_get_one_sentence(args, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        main([*args, "--out", str(tmp_path / "tuning")])
    assert not list(tmp_path.rglob("*.json"))


def test_an_interrupt_says_how_to_resume(tmp_path, monkeypatch):
    """The search has no --resume, which an interrupted training run would advise."""

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt("everything is saved; to resume, repeat the command with --resume.")

    monkeypatch.setattr("featureflock.studies.tuning.train", interrupt)
    with pytest.raises(KeyboardInterrupt, match=r"^stopped; the same command resumes the search\.$"):
        main([*QUICK, "--seeds", "1", "--out", str(tmp_path)])
