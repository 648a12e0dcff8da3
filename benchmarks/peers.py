"""The same job with other libraries and with this one: the code blocks of docs/guides/coming_from.md, run and timed.

    pip install "featureflock[peers]"
    python benchmarks/peers.py --json results/peers.json
    python benchmarks/peers.py --save predictions      # and .npz files for featureflock report --predictions

Each section of the page has a block of code that ends with `probs`, the members' predictions (n, B, C). Blocks take
turns, seed after seed, on one thread, and are timed by their CPU time. One short round before warms up imports and
caches. Libraries that are not installed are left out and reported.
"""

import argparse
import contextlib
import io
import logging
import re
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from harness import cpu_seconds, progress, write_json
from peer_training import declare_torchvision_operators

from featureflock.evaluation import evaluate_predictions
from featureflock.evaluation.metrics.registry import METRICS
from featureflock.evaluation.statistics import PairedDifference, SeedMean
from featureflock.utils.provenance import provenance

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "coming_from.md"
BASELINE = "Deep Ensembles by hand"
JOBS = {
    BASELINE: (BASELINE, ""),
    "TorchEnsemble": ("TorchEnsemble", ""),
    "TorchUncertainty, Deep Ensembles": ("TorchUncertainty", ""),
    "laplace-torch, last layer": ("laplace-torch", ""),
    "featureflock, Deep Ensembles": ("featureflock", "method = DeepEnsembles()"),
    "featureflock, feature-WGD": ("featureflock", "method = FeatureWGD()"),
}
"""Row of the table -> section of the page, and the line that chooses the method."""
PACKAGES = ("torchensemble", "torch-uncertainty", "laplace-torch", "lightning")
SCORES = ("accuracy", "nll", "raw_nll", "raw_ece")


def blocks(section: str = "") -> list[str]:
    """The Python blocks of a section of the page; by default those before the first section."""
    parts = re.split(r"^## (.*)\n", PAGE.read_text(), flags=re.M)
    text = parts[0] if not section else parts[parts.index(section) + 1]
    return re.findall(r"```python\n(.*?)```", text, flags=re.S)


def run(title: str, seed: int, epochs: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The members' predictions of a job (n, B, C), the labels (B,), and the CPU seconds of its block."""
    section, line = JOBS[title]
    names: dict[str, Any] = {}
    set_up = blocks()[0]
    assert "seed, members, epochs = 0, 5, 30" in set_up
    exec(set_up.replace("seed, members, epochs = 0, 5, 30", f"seed, members, epochs = {seed}, 5, {epochs}"), names)
    code = re.sub(r"^method = .*$", line, blocks(section)[0], flags=re.M) if line else blocks(section)[0]
    taken = cpu_seconds(lambda: exec(code, names))
    return names["probs"].detach(), names["y_test"], taken


def is_installed(package: str) -> bool:
    """Whether a distribution of this name is installed."""
    with contextlib.suppress(PackageNotFoundError):
        return bool(version(package))
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    parser.add_argument("--save", type=Path, help="folder to write predictions to, one .npz file per library and seed")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--quick", action="store_true", help="two seeds and ten epochs: to test the script")
    args = parser.parse_args()
    started = provenance()
    started["versions"] |= {name: version(name) for name in PACKAGES if is_installed(name)}
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    declare_torchvision_operators()
    rows, missing = measure(2 if args.quick else args.seeds, 10 if args.quick else 30, args.save)
    for name, reason in missing.items():
        progress(f"left out: {name}, because {reason}")
    print(table(rows))
    write_json(args.json, {**started, "quick": args.quick, "missing": missing, "rows": rows})


def measure(seeds: int, epochs: int, folder: Path | None) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row for each library, and the libraries that cannot be imported, with the reason."""
    probs: dict[str, dict[int, torch.Tensor]] = {}
    taken: dict[str, list[float]] = {}
    missing: dict[str, str] = {}
    for seed, count in [(0, 1), *((seed, epochs) for seed in range(seeds))]:
        for title in [title for title in JOBS if title not in missing]:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                try:
                    found, labels, seconds = run(title, seed, count)
                except ImportError as error:
                    missing[title] = str(error)
                    continue
            if count == epochs:
                probs.setdefault(title, {})[seed] = found
                taken.setdefault(title, []).append(seconds)
        progress(f"seed {seed}, {count} epochs: done")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for title, by_seed in probs.items():
            for seed, found in by_seed.items():
                name = title.lower().replace(", ", "-").replace(" ", "-")
                np.savez(folder / f"{name}-seed{seed}.npz", probs=found, labels=labels, method=title)
    results = evaluate_predictions(probs, labels, baseline=BASELINE)
    rows = []
    for group in results.groups:
        ratios = [ours / hand for ours, hand in zip(taken[group.title], taken[BASELINE], strict=True)]
        rows.append(
            {
                "library": group.title,
                "members": group.members,
                "seeds": group.seeds,
                "scores": {key: group.metrics[key]._asdict() for key in SCORES},
                "differences": {key: group.differences[key]._asdict() for key in SCORES if group.differences},
                "cpu_seconds": taken[group.title],
                "ratios": ratios,
            }
        )
    return rows, missing


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table: mean ± sd over seeds, differences that are significant, and time relative to the baseline."""
    titles = [METRICS[key].title for key in SCORES]
    lines = [f"| | members | {' | '.join(titles)} | time |", "|---|---:|" + "---:|" * (len(SCORES) + 1)]
    for row in rows:
        cells = []
        for key in SCORES:
            metric, value = METRICS[key], SeedMean(**row["scores"][key])
            spread = f" ± {metric.text(value.sd)}" if value.sd is not None else ""
            difference = PairedDifference(**row["differences"][key]) if row["differences"] else None
            better = difference is not None and (difference.mean > 0) == (metric.better == "higher")
            mark = "" if difference is None or not difference.significant else " ▲" if better else " ▼"
            cells.append(f"{metric.text(value.mean)}{spread}{mark}")
        ratios = row["ratios"]
        time = "1" if row["library"] == BASELINE else f"{median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        lines.append(f"| {row['library']} | {row['members']} | {' | '.join(cells)} | {time} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
