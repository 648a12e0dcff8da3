"""Twelve particles on a posterior that data determine in one direction only, with and without repulsion.

    python results/particles.py      writes results/particles.json, for a figure in docs/why_it_works.md

The log-likelihood −(x₁ x₂ − 1)² / (2 σ²) is that of a network with two weights in a row: it fixes their product and
nothing else. The prior is normal.
"""

import json
from pathlib import Path

import torch

import featureflock as ff

NOISE, PRECISION, STEP, STEPS = 0.25, 0.15, 0.01, 4000


def loglik_grad(x: torch.Tensor) -> torch.Tensor:
    error = (x.prod(1) - 1) / NOISE**2
    return -error[:, None] * x.flip(1)


def run(start: torch.Tensor, repulsion: float) -> torch.Tensor:
    x = start.clone()
    for _ in range(STEPS):
        x += STEP * ff.transport(x, loglik_grad(x), prior=ff.Normal(PRECISION), repulsion=repulsion)
    return x


def main() -> None:
    torch.manual_seed(0)
    start = torch.tensor([1.2, 0.35]) + 0.15 * torch.randn(12, 2)
    points = {"start": start, "repulsion 0": run(start, 0.0), "repulsion 1": run(start, 1.0)}
    settings = {"noise": NOISE, "precision": PRECISION, "step": STEP, "steps": STEPS}
    rounded = {name: [[round(v, 4) for v in row] for row in x.tolist()] for name, x in points.items()}
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps({"command": "python results/particles.py", **settings, "points": rounded}) + "\n")


if __name__ == "__main__":
    main()
