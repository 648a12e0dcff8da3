"""Quality of members that share weights, beside Deep Ensembles: Fashion-MNIST, 5 members, 5 seeds.

Every row trains the same MLP 256-256 on the same 10,000 images for 15 epochs. The learning rate of each row is the one
of 0.01, 0.03 and 0.1 with the lowest NLL on 1,000 held-out training images, for a seed that is not among those of the
table.
The test set is used once per run, after training. Differences vs Deep Ensembles are paired by seed, with 95 %
intervals.

    python benchmarks/sharing_quality.py [--quick] [--json results/sharing.json]

It writes the file after each run, and continues from it if it exists.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import progress, write_json

import featureflock as ff
from featureflock.data import Digits, FashionMNIST
from featureflock.evaluation import average, disagreement, member_accuracy, paired_difference, scores
from featureflock.methods import DeepEnsembles, FeatureWGD
from featureflock.models import MLPConfig, RankOneConfig, SharedTrunkConfig
from featureflock.training import ComputeConfig, Recipe, train

SEEDS, TUNING_SEED, RATES = (0, 1, 2, 3, 4), 100, (0.01, 0.03, 0.1)
NETWORK = MLPConfig((256, 256))
BASE = Recipe(
    FashionMNIST(padding=0, flip=False),
    NETWORK,
    DeepEnsembles(),
    members=5,
    epochs=15,
    batch=128,
    schedule="one-cycle",
    subset=10_000,
)
ROWS = {
    "Deep Ensembles": BASE,
    "feature-WGD": replace(BASE, method=FeatureWGD()),
    "feature-WGD, shared trunk (1 of 2 layers)": replace(
        BASE, model=SharedTrunkConfig(NETWORK, 1), method=FeatureWGD()
    ),
    "rank-one members": replace(BASE, model=RankOneConfig(NETWORK)),
    "rank-one members, feature-WGD": replace(BASE, model=RankOneConfig(NETWORK), method=FeatureWGD()),
}
METRICS = {
    "accuracy": "accuracy, % ↑",
    "nll": "NLL ↓",
    "ece": "ECE, % ↓",
    "member_accuracy": "member accuracy, %",
    "disagreement": "disagreement, %",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="digits, one epoch, two seeds: the numbers mean nothing")
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds = SEEDS[:2] if args.quick else SEEDS
    done = args.json is not None and args.json.exists()
    rows = json.loads(args.json.read_text())["rows"] if done else []
    by_title = {row["title"]: row for row in rows}
    for title, recipe in ROWS.items():
        recipe = replace(recipe, data=Digits(), epochs=1, subset=200) if args.quick else recipe
        row = by_title.setdefault(title, {"title": title, "runs": {}})
        if "learning_rate" not in row:
            row["validation_nll"] = {str(rate): _validation_nll(recipe, rate) for rate in RATES}
            row["learning_rate"] = min(RATES, key=lambda rate: row["validation_nll"][str(rate)])
        for seed in seeds:
            if str(seed) not in row["runs"]:
                row["runs"][str(seed)] = _run(replace(recipe, learning_rate=row["learning_rate"], seed=seed))
                progress(f"  {title}, seed {seed}: {row['runs'][str(seed)]}")
                write_json(args.json, {"seeds": list(seeds), "threads": 1, "rows": list(by_title.values())})
    print(table(list(by_title.values())))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: mean ± sd over seeds, then the paired difference vs the first row with its 95 % interval."""
    lines = ["| | parameters | learning rate | " + " | ".join(METRICS.values()) + " |"]
    lines.append("|---|---:|---:|" + "---:|" * len(METRICS))
    for row in rows:
        runs = row["runs"]
        cells = []
        for key in METRICS:
            values = torch.tensor([run[key] for run in runs.values()], dtype=torch.float64)
            cells.append(f"{_text(key, values.mean())} ± {_text(key, values.std())}")
        parameters = f"{next(iter(runs.values()))['parameters']:,}"
        lines.append(f"| {row['title']} | {parameters} | {row['learning_rate']:g} | " + " | ".join(cells) + " |")
        if row is rows[0]:
            continue
        cells = []
        for key in METRICS:
            of = [{int(s): run[key] for s, run in each["runs"].items()} for each in (row, rows[0])]
            difference = paired_difference(*of)
            assert difference is not None
            values = [v for v in (difference.mean, difference.low, difference.high) if v is not None]
            mean, *interval = (_text(key, torch.tensor(v)) for v in values)
            cells.append(f"{mean} ({', '.join(interval)})" if interval else mean)
        lines.append("| difference vs Deep Ensembles | | | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _text(key: str, value: torch.Tensor) -> str:
    return f"{value.item():.3f}" if key == "nll" else f"{100 * value.item():.2f}"


def _validation_nll(recipe: Recipe, rate: float) -> float:
    held_out = min(1_000, (recipe.subset or 1_000) // 2)
    with tempfile.TemporaryDirectory() as folder:
        tuned = replace(recipe, learning_rate=rate, seed=TUNING_SEED, validation=held_out)
        train(tuned, folder, compute=ComputeConfig(compile="off"))
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    nll: float = json.loads(lines[-1])["validation"]["nll"]
    return nll


def _run(recipe: Recipe) -> dict[str, float]:
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        result = train(recipe, folder, compute=ComputeConfig(compile="off"))
        ens = ff.load(Path(folder, "ensemble")).eval()
    seconds = time.process_time() - start
    test = recipe.splits().test
    batches = test.batches(list(torch.arange(len(test)).split(500)), torch.device("cpu"))
    log_probs, labels = zip(*((ens.member_predictions(batch.x), batch.y) for batch in batches), strict=True)
    members, y = torch.cat(log_probs, 1), torch.cat(labels)
    probs = members.double().exp()
    score = scores(average(members), y)
    return {
        "accuracy": score.accuracy,
        "nll": score.nll,
        "ece": score.ece,
        "member_accuracy": sum(member_accuracy(probs, y)) / len(probs),
        "disagreement": disagreement(probs),
        "parameters": result["parameters"],
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
