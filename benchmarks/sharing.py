"""What members that share weights cost: parameters, memory and time, relative to one network and to Deep Ensembles.

    trunk      members with small networks on a frozen transformer of MiniLM's size (6 layers of 384 features), computed
               once, relative to one such member; batches of 16 texts of 32 tokens
    rank one   n members in one wide residual network for 32×32 images, batches of 32
    LoRA       n members of rank 8 in all linear layers of the frozen transformer

Training steps are those of feature-WGD with SGD and momentum; Deep Ensembles have n separate networks. "State" is
weights, gradients and momenta. Peaks count on top of the state: the tensors that one more step allocates (harness.py).
Times are processor times in one thread; the cases take turns, and reported is the median of the ratios within a round.

    python benchmarks/sharing.py [--quick] [--rounds N] [--json results/benchmark_sharing.json]
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import peak_allocated, progress, ratios, row, table, write_json
from torch import Tensor, nn

import featureflock as ff
from featureflock.ensemble import SharedMembers
from featureflock.methods import DeepEnsembles, FeatureWGD, Method
from featureflock.models import WideResNetConfig

SEED, CLASSES = 0, 10
TRUNK_LIMIT = 1.3
"""Target for the time of 4 members on a frozen transformer trunk, relative to one."""


class Case(NamedTuple):
    """An ensemble that is trained by one method on one batch."""

    ens: ff.Ensemble
    method: Method
    x: Tensor
    y: Tensor
    optimiser: torch.optim.Optimizer

    def step(self) -> None:
        self.optimiser.zero_grad(set_to_none=False)
        self.method.loss(self.ens, self.x, self.y).loss.backward()
        self.optimiser.step()

    def predict(self) -> None:
        self.ens.predict(self.x)

    def parameters(self) -> int:
        return sum(p.numel() for p in self.ens.parameters())

    def state(self) -> int:
        trained = sum(2 * p.nbytes for p in self.ens.parameters() if p.requires_grad)
        return trained + sum(t.nbytes for t in self.ens.state_dict().values())


class Transformer(nn.Module):
    """Tokens to the mean of their features."""

    def __init__(self, layers: int, features: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, features)
        self.blocks = nn.ModuleList(Block(features) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


class Block(nn.Module):
    """Self-attention and two linear layers, each after LayerNorm."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 32)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small networks, one round: the numbers mean nothing")
    parser.add_argument("--rounds", type=int, default=5, help="number of timed rounds")
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    args = parser.parse_args()
    rows = measure("quick" if args.quick else "usual", 1 if args.quick else args.rounds)
    print(table(rows))
    write_json(args.json, {"seeds": [SEED], "threads": 1, "rounds": args.rounds, "rows": rows})


def measure(scale: str, rounds: int = 5) -> list[dict[str, Any]]:
    """Rows for the table of bench.py."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    quick = scale == "quick"
    n, layers, features = (3, 1, 32) if quick else (10, 6, 384)
    images, tokens = torch.randn(4 if quick else 32, 3, 32, 32), torch.randint(1000, (2 if quick else 16, 32))
    network = WideResNetConfig(10, 1 if quick else 2)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            return [
                *_trunk(layers, features, tokens, rounds, "" if quick else f"≤ {TRUNK_LIMIT}"),
                *_members("rank one", lambda: network.extractor((3, 32, 32)), ff.rank_one, n, images, rounds),
                *_members("LoRA", lambda: Transformer(layers, features), _lora, n, tokens, rounds),
            ]
    finally:
        torch.set_num_threads(threads)


def _trunk(layers: int, features: int, x: Tensor, rounds: int, target: str) -> list[dict[str, Any]]:
    def ensemble(members: int) -> ff.Ensemble:
        small = [nn.Sequential(nn.Linear(features, 128), nn.ReLU()) for _ in range(members)]
        trunk = Transformer(layers, features).requires_grad_(False)
        return ff.Ensemble(small, nn.Linear(128, CLASSES), ff.ParticleLayer(rank=members), trunk=trunk)

    def separate(members: int) -> ff.Ensemble:
        ens = ensemble(members)
        extractors = [nn.Sequential(ens.trunk, e) for e in ens.extractors]
        return ff.Ensemble(extractors, ens.head, ens.layer)

    progress("  frozen trunk")
    cases = {"one": _case(ensemble(1), x), "shared": _case(ensemble(4), x), "each": _case(separate(4), x)}
    steps = _in_turns({name: case.step for name, case in cases.items()}, rounds)
    predictions = _in_turns({name: case.predict for name, case in cases.items()}, rounds)
    name = "4 members on a frozen transformer trunk"
    return [
        row(f"{name}: time of a step relative to one member", ratios(steps["shared"], steps["one"]), target),
        row(
            f"{name}: time of prediction relative to one member",
            ratios(predictions["shared"], predictions["one"]),
            target,
        ),
        row("the same, each member running the trunk: time of a step", ratios(steps["each"], steps["one"])),
    ]


def _members(
    name: str,
    make: Callable[[], nn.Module],
    share: Callable[[nn.Module, int], SharedMembers],
    n: int,
    x: Tensor,
    rounds: int,
) -> list[dict[str, Any]]:
    """n members in one network, relative to one network and to n networks trained as Deep Ensembles."""
    progress(f"  {name}")
    features = make()(x[:2]).shape[1]

    def head() -> nn.Module:
        return nn.Linear(features, CLASSES)

    shared = _case(FeatureWGD().build(make, head, members=n, share=share), x)
    low = _case(FeatureWGD().build(make, head, members=n, share=share), x)
    low.ens.execution = "low_memory"
    cases = {
        "one": _case(DeepEnsembles().build(make, head, members=1), x, DeepEnsembles()),
        "Deep Ensembles": _case(DeepEnsembles().build(make, head, members=n), x, DeepEnsembles()),
        "shared": shared,
        "low memory": low,
    }
    for case in cases.values():
        case.step()
    peaks = {key: peak_allocated(case.step) for key, case in cases.items()}
    steps = _in_turns({key: case.step for key, case in cases.items()}, rounds)
    predictions = _in_turns({key: case.predict for key, case in cases.items() if key != "low memory"}, rounds)
    rows = []
    for other, label in (("one", "one network"), ("Deep Ensembles", f"Deep Ensembles of {n}")):
        relative = f"{name}, n = {n}, relative to {label}"
        base = cases[other]
        rows += [
            row(f"{relative}: parameters", [shared.parameters() / base.parameters()]),
            row(f"{relative}: state", [shared.state() / base.state()]),
            row(f"{relative}: peak memory of a step", [peaks["shared"] / peaks[other]]),
            row(f"{relative}: peak memory of a step, low_memory", [peaks["low memory"] / peaks[other]]),
            row(f"{relative}: time of a step", ratios(steps["shared"], steps[other])),
            row(f"{relative}: time of a step, low_memory", ratios(steps["low memory"], steps[other])),
            row(f"{relative}: time of prediction", ratios(predictions["shared"], predictions[other])),
        ]
    return rows


def _lora(network: nn.Module, n: int) -> SharedMembers:
    return ff.lora(network, n, rank=8)


def _case(ens: ff.Ensemble, x: Tensor, method: Method = FeatureWGD()) -> Case:
    trained = [p for p in ens.parameters() if p.requires_grad]
    return Case(ens, method, x, torch.arange(len(x)) % CLASSES, torch.optim.SGD(trained, lr=1e-3, momentum=0.9))


def _in_turns(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            taken[name].append(time.process_time() - start)
    return {name: times[1:] for name, times in taken.items()}  # the first round warms up


if __name__ == "__main__":
    main()
