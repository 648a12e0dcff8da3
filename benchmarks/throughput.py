"""Training throughput: `featureflock train` compared with a plain loop over members and with the machine's peak.

    plain       Deep Ensembles without the library: eager, default memory format, one SGD per member, a DataLoader
                whose transforms work on one PIL image at a time (crop, flip, normalise), in this process: workers
                would prefetch while the other processes are being timed
    featureflock  the real `train` with its default choices: feature-WGD, its data pipeline, channels_last,
                compilation, threads; and in bfloat16, where the processor has instructions for it
    peak        the best sustained rate of a large matrix product or a 3×3 convolution, either on all threads at once or
                one on each thread, whichever is highest

Each runs in its own process, and they take turns: a round is one step of each. Ratios are taken within a round, then
their median over rounds. FLOPs count two per multiply-add: forward, and twice that backward.

    python benchmarks/bench.py --only throughput [--quick] [--full] [--json FILE]
"""

import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import Worker, progress, ratios, row, seconds
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from featureflock.cpu_kernels.bfloat16 import has_bfloat16
from featureflock.cpu_kernels.malloc import reuse_freed_memory
from featureflock.data import CustomData
from featureflock.models import WideResNetConfig
from featureflock.training import ComputeConfig, Recipe, Reporter, train
from featureflock.training.recipe import Precision

SEED, BATCH, IMAGES = 0, 128, 10_000
MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)


def measure(scale: str) -> list[dict[str, Any]]:
    flops = 1e9 if scale == "quick" else 1e11
    progress("  finding the machine's peak")
    peak = Worker(_peak, flops)
    try:
        if scale == "quick":
            return _compare(WideResNetConfig(10, 1), 2, 1, peak, flops, "", "", ComputeConfig(compile="off"))
        rounds = 12 if scale == "full" else 3
        small = _compare(WideResNetConfig(10, 2), 4, 2 * rounds, peak, flops, "≥ 1.5", "")
        members = 4 if scale == "full" else 2
        large = _compare(WideResNetConfig(16, 4), members, rounds, peak, flops, "≥ 1.6", "≥ 0.85")
        if not has_bfloat16():
            return small + large
        eager = ComputeConfig(compile="off")  # what `auto` takes with bfloat16
        half = _compare(WideResNetConfig(16, 4), members, rounds, peak, flops, "≥ 2.5", "", eager, "bfloat16")
        return small + large + half[:1]
    finally:
        peak.close()


def _compare(
    network: WideResNetConfig,
    members: int,
    rounds: int,
    peak: Worker,
    peak_flops: float,
    faster: str,
    fraction: str,
    compute: ComputeConfig = ComputeConfig(compile="on"),
    precision: Precision = "float32",
) -> list[dict[str, Any]]:
    name = f"WRN-{network.depth}-{network.width} × {members}" + ", bfloat16" * (precision == "bfloat16")
    progress(f"  {name}")
    workers = {
        "plain": Worker(_plain, network, members),
        "featureflock": Worker(_featureflock, network, members, compute, precision),
        "peak": peak,
    }
    taken: dict[str, list[float]] = {who: [] for who in workers}
    for i in range(rounds):
        for who in random.Random(i).sample(list(workers), len(workers)):
            taken[who].append(workers[who].seconds())
    for who in ("plain", "featureflock"):
        workers[who].close()
    flops = 3 * members * _forward_flops(network)
    rates = [flops / s for s in taken["featureflock"]]
    fractions = ratios(rates, [peak_flops / s for s in taken["peak"]])
    speed = ratios(taken["plain"], taken["featureflock"])
    images = [members * BATCH / s for s in taken["featureflock"]]
    return [
        row(
            f"{name}: train, speed-up over a plain loop",
            speed,
            faster,
            seconds=taken,
            images_times_members_per_second=images,
        ),
        row(f"{name}: train, fraction of the machine's peak", fractions, fraction, flops_per_second=rates),
    ]


def _forward_flops(network: WideResNetConfig) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network.extractor((3, 32, 32))(torch.zeros(BATCH, 3, 32, 32))
    return counter.get_total_flops()


def _random_images() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(SEED)
    return generator.integers(0, 256, (IMAGES, 32, 32, 3), np.uint8), generator.integers(0, 10, IMAGES)


def _featureflock(
    turn: Callable[[], None], network: WideResNetConfig, members: int, compute: ComputeConfig, precision: Precision
) -> None:
    class Turns(Reporter):
        def step(self, step: int, averages: object) -> None:
            turn()

    reuse_freed_memory()  # as `featureflock train` does
    x, y = (torch.from_numpy(array) for array in _random_images())
    x = x.permute(0, 3, 1, 2).contiguous()
    data = CustomData(train=(x, y), test=(x[:BATCH], y[:BATCH]), padding=4, flip=True)
    recipe = Recipe(data=data, model=network, members=members, batch=BATCH, epochs=1000, precision=precision)
    with tempfile.TemporaryDirectory() as folder:
        train(recipe, Path(folder, "run"), compute=compute, reporter=Turns())


class _Transformed(Dataset[tuple[Tensor, int]]):
    """As torchvision's RandomCrop(32, padding=4), RandomHorizontalFlip, ToTensor and Normalize."""

    def __init__(self) -> None:
        self.x, self.y = _random_images()
        self.mean, self.std = (torch.tensor(v)[:, None, None] for v in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = ImageOps.expand(Image.fromarray(self.x[index]), 4)
        left, top = random.randrange(9), random.randrange(9)
        image = image.crop((left, top, left + 32, top + 32))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
        return (x - self.mean) / self.std, int(self.y[index])


def _plain(turn: Callable[[], None], network: WideResNetConfig, members: int) -> None:
    torch.manual_seed(SEED)
    nets: list[nn.Module] = []
    for _ in range(members):
        extractor = network.extractor((3, 32, 32))
        nets.append(nn.Sequential(extractor, network.head(extractor, 10)))
    optimisers = [
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4) for net in nets
    ]
    for x, y in _endless(DataLoader(_Transformed(), BATCH, shuffle=True)):
        for net, optimiser in zip(nets, optimisers, strict=True):
            optimiser.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimiser.step()
        turn()


def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _peak(turn: Callable[[], None], peak_flops: float) -> None:
    """Spend `peak_flops` per turn on the fastest operation, which is determined first."""
    threads = torch.get_num_threads()
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    x, w = (
        torch.randn(s).contiguous(memory_format=torch.channels_last) for s in ((128, 128, 16, 16), (128, 128, 3, 3))
    )
    kinds = [(lambda: a @ b, 2 * 2048**3), (lambda: F.conv2d(x, w, padding=1), 2 * 128 * 128 * 128 * 9 * 256)]

    def one_thread() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()

    pool = ThreadPoolExecutor(threads, initializer=one_thread)
    list(pool.map(lambda _: kinds[1][0](), range(4 * threads)))
    torch.set_num_threads(threads)

    def repeat(call: Callable[[], object], times: int) -> None:
        for _ in range(times):
            call()

    def together(call: Callable[[], object], times: int) -> None:
        list(pool.map(lambda _: repeat(call, times // threads), range(threads)))

    ways = [
        partial(way, call, threads * max(1, round(peak_flops / flops / threads)))
        for call, flops in kinds
        for way in (repeat, together)
    ]
    best = min(ways, key=lambda way: min(seconds(way) for _ in range(3)))
    while True:
        best()
        turn()
