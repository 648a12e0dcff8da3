"""Tabular classification: FlockClassifier beside scikit-learn's classifiers, each with its default settings.

    python benchmarks/tabular.py --json results/benchmark_tabular.json

Breast cancer, wine and digits come with scikit-learn; the cut of diamonds, from their other columns and the price,
comes with plotnine (3,000 diamonds for training, 3,000 for testing). A seed chooses the split, 75 % for training, and
the random state of the classifier. Nothing is tuned. MLPClassifier gets standardised inputs and up to 1,000 epochs.
Probabilities are at least 2.2e-16 in the NLL, as in scikit-learn's log_loss, because random forests predict zeros.
Everything runs on one thread, and fits are timed by their CPU time.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from harness import cpu_seconds, progress, write_json
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from featureflock.data import Diamonds
from featureflock.evaluation import accuracy, ece, nll
from featureflock.integrations import FlockClassifier
from featureflock.methods import DeepEnsembles, FeatureWGD, Single
from featureflock.utils.provenance import provenance

CLASSIFIERS: dict[str, Callable[..., Any]] = {
    "feature-WGD": partial(FlockClassifier, FeatureWGD()),
    "Deep Ensembles": partial(FlockClassifier, DeepEnsembles()),
    "Single": partial(FlockClassifier, Single()),
    "MLPClassifier": lambda random_state: make_pipeline(
        StandardScaler(), MLPClassifier(max_iter=1000, random_state=random_state)
    ),
    "RandomForest": RandomForestClassifier,
    "HistGradientBoosting": HistGradientBoostingClassifier,
}
EPSILON = float(np.finfo(np.float64).eps)
METRICS: dict[str, Callable[..., float]] = {
    "accuracy": accuracy,
    "nll": lambda probs, y: nll(probs.clamp_min(EPSILON), y),
    "ece": ece,
}


def diamonds_cut() -> tuple[np.ndarray, np.ndarray]:
    """The first 6,000 training diamonds: carat, depth, table, x, y, z, colour, clarity, log price; and the cut."""
    splits = Diamonds().load()
    batch = next(iter(splits.train.batches([torch.arange(6000)], torch.device("cpu"))))
    names = list(splits.feature_names)
    columns = [i for i, name in enumerate(names) if name != "cut"]
    x = torch.cat([batch.x[:, columns], batch.y.reshape(-1, 1)], 1).numpy()
    return x, np.unique(batch.x[:, names.index("cut")].numpy(), return_inverse=True)[1]


DATA: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
    "breast cancer": partial(load_breast_cancer, return_X_y=True),
    "wine": partial(load_wine, return_X_y=True),
    "digits": partial(load_digits, return_X_y=True),
    "diamonds' cut": diamonds_cut,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--data", nargs="+", choices=list(DATA), default=list(DATA), help="data sets")
    parser.add_argument("--quick", action="store_true", help="wine, two seeds and three epochs: to test the script")
    args = parser.parse_args()
    started, threads = provenance(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            rows = [
                measure(data, name, range(2 if args.quick else args.seeds), args.quick)
                for data in (["wine"] if args.quick else args.data)
                for name in CLASSIFIERS
            ]
    finally:
        torch.set_num_threads(threads)
    print(table(rows))
    write_json(args.json, {**started, "quick": args.quick, "rows": rows})


def measure(data: str, name: str, seeds: range, quick: bool) -> dict[str, Any]:
    """Test scores and fit time of a classifier for each seed."""
    X, y = DATA[data]()
    by_seed: dict[str, list[float]] = {key: [] for key in (*METRICS, "fit_cpu_seconds")}
    for seed in seeds:
        share = 0.5 if data == "diamonds' cut" else 0.25
        X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=share, random_state=seed, stratify=y)
        model = CLASSIFIERS[name](random_state=seed)
        if quick and isinstance(model, FlockClassifier):
            model.set_params(epochs=3)
        by_seed["fit_cpu_seconds"].append(cpu_seconds(lambda model=model, X=X_train, y=y_train: model.fit(X, y)))
        probs = torch.from_numpy(np.asarray(model.predict_proba(X_test)))
        for key, metric in METRICS.items():
            by_seed[key].append(float(metric(probs, torch.from_numpy(y_test))))
    progress(f"{data}, {name}: {by_seed}")
    return {"data": data, "classifier": name, "seeds": list(seeds), "train": len(y_train), "by_seed": by_seed}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table, mean ± sd over seeds."""
    lines = ["| data | classifier | accuracy | NLL | ECE | fit, CPU s |", "|---|---|---:|---:|---:|---:|"]
    for row in rows:
        cells = [f"{fmean(v):.3f} ± {stdev(v):.3f}" if len(v) > 1 else f"{v[0]:.3f}" for v in row["by_seed"].values()]
        lines.append(f"| {row['data']} | {row['classifier']} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
