"""Cost model of a training step on a mesh of M × D processes (members × data): one equation, and its constants.

    t = σ(P) [ ⌈n/M⌉ member(b) + after(⌈b/M⌉) ] + Σ_collectives (α + sent/β),    b = ⌈B/D⌉,  P = M D

    member(b)   one member's forward and backward pass and its optimiser, for b examples: max(least, fixed + rate · b)
    after(b)    everything after the members, for all n of them: particle layer, shared head, loss; divided among the
                processes of a row, as if the loss were too, for a shared head, otherwise after(b)
    σ(P)        slow-down of a process by the others. K cores that are all busy slow each other down by κ, and more
                than K processes take turns:  σ(P) = [1 + (κ − 1) min(1, (P − 1)/(K − 1))] · max(1, P/K)
    sent        a sum of x bytes among P processes sends 2 (P − 1)/P · x from each, a gather (P − 1) x, an exchange
                (all-to-all) (P − 1)/P · x

Gradients may be summed during the backward pass, 2/3 of the members' time; then they take what is longer than that.
Waiting for slower processes, data loading and evaluation are left out.

`step_prediction.py` measures the constants of a CPU and compares predictions with measured steps. `projected` uses
assumed constants of GPUs (`GPU`): nothing there is measured.

Shapes: n members, B examples in a batch, H features, C classes, W weights and S running statistics of a member.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from featureflock.methods import DeepEnsembles, FeatureWGD, Method, WeightWGD
from featureflock.models import WideResNetConfig
from featureflock.models.base import ModelConfig
from featureflock.training import RECIPES

GPU = {
    "FLOP/s": 0.3 * 312e12,
    "float64 FLOP/s": 0.3 * 9.7e12,
    "eigh FLOP/s": 1e11,
    "in a node": 0.5 * 300e9,
    "between nodes": 0.5 * 25e9,
    "seconds per kernel": 5e-6,
    "seconds per collective": 20e-6,
}
"""Assumed: 30 % of an A100's peak in bfloat16 and float64, 1 % of it in eigenvalue problems; half of the bandwidth of
NVLink each way, and of 200 Gb/s; the time of a small GPU kernel, and the latency of a collective."""
SLICE, KERNELS_PER_SLICE = 2**24, 29
"""Values of the features in a slice of the layer on a GPU, and kernels of its backward pass for each slice, counted
(WGD, Cauchy, rank 5)."""
KERNELS_PER_MODULE = 4
"""Of a module without children in a training step: forward, two gradients, optimiser."""


@dataclass(frozen=True)
class Sizes:
    """Shapes of an ensemble and its method; see the module docstring."""

    method: Method
    n: int
    B: int
    H: int
    C: int
    extractor: int
    """Weights of one extractor."""
    S: int

    @property
    def head(self) -> int:
        return (self.H + 1) * self.C

    @staticmethod
    def of(method: Method, model: ModelConfig, shape: tuple[int, ...], n: int, B: int, C: int) -> "Sizes":
        with torch.device("meta"):
            network: Any = model.extractor(shape)
        weights = sum(p.numel() for p in network.parameters())
        statistics = sum(b.numel() for b in network.buffers() if b.is_floating_point())
        return Sizes(method, n, B, network.feature_dim, C, weights, statistics)

    def bytes_passed(self, M: int, D: int, m: int = 0, d: int = 0) -> dict[str, int]:
        """Bytes per step of the process in column m and row d, by purpose."""
        totals = {"n × n sums": 0, "gather": 0, "gradients": 0}
        for c in self.collectives(M, D, m, d):
            totals[c.purpose] += c.passed
        bookkeeping = (8 * D + 8 * (self.n + 5)) * (D > 1) + 16 * (M * D > 1)
        return {**totals, "bookkeeping": bookkeeping}

    def collectives(self, M: int, D: int, m: int = 0, d: int = 0) -> list["Collective"]:
        """Those of a step, without bookkeeping, for the process in column m and row d."""
        n, shared, weights = self.n, isinstance(self.method, FeatureWGD), isinstance(self.method, WeightWGD)
        most, here = math.ceil(n / M), len(range(n)[part(n, M, m)])
        examples = len(range(self.B)[part(self.B, D, d)])
        W = self.extractor + (0 if shared else self.head)
        rows = len(range(examples)[part(examples, M, m)])
        gathered = most * examples * self.C + (2 * most * W if weights else 0)
        if shared:
            gathered = n * math.ceil(examples / M) * self.C
        averaged = here * (W + self.S) + (here * W if weights else 0)
        sums = 0 if isinstance(self.method, DeepEnsembles | WeightWGD) else 8 * (2 * n**2 + 2)
        calls = [
            Collective("n × n sums", "sum", M * D if shared else D, sums),
            Collective("gather", "exchange", M, 4 * here * examples * self.H * shared),
            Collective("gather", "gather", M, 4 * gathered),
            Collective("gather", "exchange", M, 4 * n * rows * self.H * shared),
            Collective("gradients", "sum", D, 4 * averaged),
            Collective("gradients", "sum", M * D, 4 * self.head * shared),
        ]
        return [c for c in calls if c.processes > 1 and c.passed]


@dataclass(frozen=True)
class Collective:
    """A collective of one step."""

    purpose: str
    kind: Literal["sum", "gather", "exchange"]
    processes: int
    passed: int
    """Bytes that a process passes to it."""

    @property
    def sent(self) -> float:
        """Bytes that a process sends in a ring."""
        factor = {"sum": 2 / self.processes, "gather": 1.0, "exchange": 1 / self.processes}[self.kind]
        return (self.processes - 1) * self.passed * factor


@dataclass(frozen=True)
class Cost:
    """Seconds of a computation: max(least, fixed + per_example · examples)."""

    fixed: float
    per_example: float
    least: float = 0.0

    def seconds(self, examples: int) -> float:
        return max(self.least, self.fixed + self.per_example * examples)

    @staticmethod
    def through(points: Sequence[tuple[int, float]]) -> "Cost":
        """The line of least squares through pairs (examples, seconds), with no negative coefficient."""
        x, y = (torch.tensor(values, dtype=torch.float64) for values in zip(*points, strict=True))
        slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
        intercept = float(y.mean()) - slope * float(x.mean())
        if intercept < 0:
            return Cost(0.0, float((x * y).sum() / (x * x).sum()))
        return Cost(intercept, slope) if slope >= 0 else Cost(float(y.mean()), 0.0)


@dataclass(frozen=True)
class Link:
    """Latency in seconds and bandwidth in bytes per second of one kind of collective."""

    latency: float
    bandwidth: float

    def seconds(self, sent: float) -> float:
        return self.latency + sent / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """Constants of the equation, for one ensemble."""

    member: Cost
    after: Cost
    links: dict[str, Link]
    """Of sums and gathers, by kind; an exchange has the link of a gather."""
    cores: float = math.inf
    """K; infinite if each process has its own device."""
    contention: float = 1.0
    """κ."""
    overlapped: bool = False
    """Gradients are summed during the backward pass. Where processes share cores, this saves nothing."""

    def slow_down(self, processes: int) -> float:
        """σ(P)."""
        if processes == 1 or math.isinf(self.cores):
            return 1.0
        busy = 1.0 if self.cores <= 1 else min(1.0, (processes - 1) / (self.cores - 1))
        return (1 + (self.contention - 1) * busy) * max(1.0, processes / self.cores)


def step_seconds(machine: Machine, sizes: Sizes, M: int, D: int) -> dict[str, float]:
    """Seconds of a step by part; they add up to the time of the step."""
    b, slower = math.ceil(sizes.B / D), machine.slow_down(M * D)
    rows = math.ceil(b / M) if isinstance(sizes.method, FeatureWGD) else b
    parts = {
        "members": slower * math.ceil(sizes.n / M) * machine.member.seconds(b),
        "after": slower * machine.after.seconds(rows),
        "n × n sums": 0.0,
        "gather": 0.0,
        "gradients": 0.0,
    }
    for c in sizes.collectives(M, D):
        parts[c.purpose] += machine.links["sum" if c.kind == "sum" else "gather"].seconds(c.sent)
    if machine.overlapped:
        parts["gradients"] = max(0.0, parts["gradients"] - 2 / 3 * parts["members"])
    return parts


def part(count: int, size: int, rank: int) -> slice:
    """Part of `count` items, as equal as possible; the first processes have one more."""
    start, stop = (count // size * r + min(r, count % size) for r in (rank, rank + 1))
    return slice(start, stop)


@dataclass(frozen=True)
class Plan:
    """An ensemble on a mesh of GPUs."""

    name: str
    model: ModelConfig
    shape: tuple[int, ...]
    classes: int
    members: int
    batch: int
    mesh: tuple[int, int]
    where: str
    """The interconnect."""
    images: int
    """Of the training set, times epochs."""


def _resnet(members: int, mesh: tuple[int, int], where: str) -> Plan:
    model = RECIPES["imagenet-resnet50"].recipe.model
    return Plan(f"ResNet-50 × {members}", model, (3, 224, 224), 1000, members, 256, mesh, where, 90 * 1_281_167)


def _small(members: int, mesh: tuple[int, int], where: str) -> Plan:
    model = WideResNetConfig(16, 1)
    return Plan(f"WRN-16-1 × {members:,}", model, (3, 32, 32), 10, members, 128, mesh, where, 300 * 50_000)


PLANS = (
    _resnet(5, (1, 1), "in a node"),
    _resnet(5, (5, 1), "in a node"),
    _resnet(5, (1, 8), "in a node"),
    _resnet(5, (5, 8), "between nodes"),
    _resnet(100, (100, 1), "between nodes"),
    _resnet(100, (20, 5), "between nodes"),
    _small(1000, (1, 1), "in a node"),
    _small(1000, (8, 1), "in a node"),
    _small(1000, (40, 1), "between nodes"),
    _small(1000, (200, 1), "between nodes"),
)


def gpu(plan: Plan, sizes: Sizes, forward: float, modules: int) -> Machine:
    """A GPU for each process, at the assumed rates; `forward` are the FLOPs of one example in one member."""
    n, kernel = plan.members, GPU["seconds per kernel"]
    values = n * math.ceil(plan.batch / math.prod(plan.mesh)) * sizes.H
    head, products = 6 * n * sizes.H * sizes.C / GPU["FLOP/s"], 6 * n**2 * sizes.H / GPU["float64 FLOP/s"]
    layer = math.ceil(values / SLICE) * KERNELS_PER_SLICE * kernel + 9 * n**3 / GPU["eigh FLOP/s"]
    link = Link(GPU["seconds per collective"], GPU[plan.where])
    return Machine(
        Cost(0.0, 3 * forward / GPU["FLOP/s"], least=KERNELS_PER_MODULE * modules * kernel),
        Cost(layer, head + products),
        {"sum": link, "gather": link},
        overlapped=True,
    )


def projected(plans: Sequence[Plan] = PLANS) -> list[dict[str, Any]]:
    """Time and traffic of a step and memory of a process at the assumed rates, for feature-WGD."""
    rows = []
    for plan in plans:
        sizes = Sizes.of(FeatureWGD(), plan.model, plan.shape, plan.members, plan.batch, plan.classes)
        (M, D), (forward, activations, modules) = plan.mesh, _of_one_example(plan)
        seconds = step_seconds(gpu(plan, sizes, forward, modules), sizes, M, D)
        step = sum(seconds.values())
        here, examples = math.ceil(sizes.n / M), math.ceil(sizes.B / D)
        features = 4 * sizes.n * math.ceil(examples / M) * sizes.H
        logits = 4 * sizes.n * examples * sizes.C
        # Weights, gradients, momentum, the flat copy that is averaged; activations in bfloat16; exchanged features, the
        # layer's copy and two gradients; logits, log-probabilities and gradients.
        weights = 4 * (4 if D > 1 else 3) * (here * sizes.extractor + sizes.head)
        memory = weights + 2 * activations * examples * here + 4 * features + 3 * logits
        rows.append(
            {
                "ensemble": plan.name,
                "members × data": f"{M} × {D}",
                "members, ms": f"{1000 * seconds['members']:.1f}",
                "layer and head, ms": f"{1000 * seconds['after']:.1f}",
                "gather, ms": f"{1000 * (seconds['gather'] + seconds['n × n sums']):.1f}",
                "gradients, ms": f"{1000 * seconds['gradients']:.1f}",
                "step, ms": f"{1000 * step:.0f}",
                "sent, MB": f"{sum(c.sent for c in sizes.collectives(M, D)) / 1e6:,.0f}",
                "memory, GB": f"{memory / 1e9:.0f}",
                "training, hours": f"{step * plan.images / sizes.B / 3600:.0f}",
            }
        )
    return rows


def _of_one_example(plan: Plan) -> tuple[float, int, int]:
    """FLOPs of a forward pass, values that a backward pass needs, and the number of modules without children."""
    sizes: list[int] = []  # of the outputs of single layers
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        network = plan.model.extractor(plan.shape)
        for module in network.modules():
            if not list(module.children()):
                module.register_forward_hook(lambda _, inputs, output: sizes.append(output.numel()))
        network(torch.empty(1, *plan.shape))
    return counter.get_total_flops(), sum(sizes), len(sizes)
