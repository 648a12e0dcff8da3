"""Norms of data gradient, prior and repulsion of feature-WGD through training.

    python results/forces.py repulsion-cifar10 "feature-WGD, τ = 10" runs results/forces_cifar10.json

Trains one row of a study with seed 0 and records, every 50 steps, means over the members of the norms of g, s and
τ ∇ log q (see featureflock/core/transport.py), the angles between them, and the cosine similarity of the data gradients
of two members. Recording changes nothing in the training.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from featureflock.core import layer
from featureflock.studies import STUDIES, study_runs
from featureflock.training import ComputeConfig, train
from featureflock.utils.provenance import provenance

EVERY = 50


@contextmanager
def recording() -> Iterator[list[dict[str, float]]]:
    """Record the terms of the update in every 50th backward pass of a `ParticleLayer`."""
    original, lines, calls = layer.ascent_direction, list[dict[str, float]](), 0

    def recorded(h: Tensor, grad: Tensor, config: Any, **factors: Any) -> tuple[Tensor, Tensor]:
        nonlocal calls
        v, finite = original(h, grad, config, **factors)
        if calls % EVERY == 0:
            g = grad.double() * float(factors["grad_factor"])
            s = config.prior.score(h.double())
            lines.append({"step": calls, **terms(h.double(), g, s, v.double() / float(factors["v_factor"]) - g - s)})
        calls += 1
        return v, finite

    layer.ascent_direction = recorded  # type: ignore[assignment]
    try:
        yield lines
    finally:
        layer.ascent_direction = original


def terms(h: Tensor, data: Tensor, prior: Tensor, repulsion: Tensor) -> dict[str, float]:
    """Norms and angles of the three terms of the update, each (n, d), means over the members."""
    others = ~torch.eye(len(h), dtype=torch.bool)
    between = F.cosine_similarity(data[:, None], data[None], dim=2)
    return {
        "data": float(data.norm(dim=1).mean()),
        "prior": float(prior.norm(dim=1).mean()),
        "repulsion": float(repulsion.norm(dim=1).mean()),
        "features": float(h.norm(dim=1).mean()),
        "distance": float(torch.cdist(h, h)[others].mean()),
        "cos_repulsion_data": float(F.cosine_similarity(repulsion, data, dim=1).mean()),
        "cos_data_between_members": float(between[others].mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study")
    parser.add_argument("row", help="title of a row of feature-WGD")
    parser.add_argument("folder", type=Path, help="folder for the run, which must be new")
    parser.add_argument("json", type=Path)
    options = parser.parse_args()
    runs = study_runs(STUDIES[options.study], "laptop", options.folder, 1)
    (run,) = [run for run in runs if run.row.title == options.row]
    with recording() as lines:
        train(run.recipe, run.folder, compute=ComputeConfig(compile="off"))
    content = {"study": options.study, "row": options.row, "seed": 0, "steps": lines, "provenance": provenance()}
    options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
