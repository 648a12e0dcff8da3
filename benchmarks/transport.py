"""Time and memory of `featureflock.transport` for n particles of dimension d.

Time, as two ratios. Each is the median over rounds of the ratio of two processor times in one thread from the same
round.

    /(d/10)    time at d relative to d/10: 10 if time is linear in d, less where a fixed cost still matters, more where
               arrays outgrow the cache and the result (32 MB and more) is newly allocated memory each time
    /floor     time relative to the three float32 products G Gᵀ, H Gᵀ and (n × n) G alone, which Algorithm 1 cannot
               avoid; `transport` computes them in float64, and the prior's score and checks in addition

Memory: the peak during one call in addition to its two inputs of n · d · 4 bytes each. The result is another array of
that size, and counts. Measured in a fresh process after a small warm-up call (harness.py): tensor allocations, and the
resident set as a cross-check. Below 64 MB the latter says more about the C library than about `transport`, and is given
in bytes only.

    python benchmarks/transport.py [--quick] [--json results/benchmark_transport.json]
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import MB, in_fresh_process, peak_allocated, peak_resident, write_json
from torch import Tensor

import featureflock as ff

SEED = 0
PRIOR = ff.Cauchy(1e-3)
SMALL = 64 * MB
LIMIT = 3.0
"""Target for the peak memory in addition to the inputs, relative to the size of the particles."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small subset, in seconds")
    parser.add_argument("--rounds", type=int, default=5, help="number of timed rounds")
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # As in any program that has used larger arrays before: glibc now caches released memory of this size. At first it
    # returns it to the system, and allocating it again takes longer than the arithmetic on it.
    torch.empty(31 * MB, dtype=torch.uint8)
    ns, ds = ((2, 10), (10_000, 100_000)) if args.quick else ((2, 5, 10, 20, 50, 128), (10_000, 100_000, 1_000_000))

    print("   n        d  particles       time  /(d/10)  /floor   allocated          resident")
    memory = in_fresh_process(_memory, [(n, d) for n in ns for d in ds])
    rows: list[dict[str, Any]] = []
    for n in ns:
        for times in _times(n, ds, args.rounds):
            row = times | memory[len(rows)]
            rows.append(row)
            ratio = "      –" if row["time_over_tenth"] is None else f"{row['time_over_tenth']:7.1f}"
            print(
                f"{n:4} {row['d']:8} {row['particles_bytes'] / MB:7.1f} MB {row['seconds'] * 1e3:7.1f} ms  {ratio} "
                f"{row['time_over_floor']:7.1f}  {_size(row, 'allocated')}  {_size(row, 'resident')}",
                flush=True,
            )
    print(f"\nPeak memory in addition to the inputs, relative to the size of the particles; target: at most {LIMIT}.")
    for text, chosen in (
        ("64 MB and more", [row for row in rows if row["particles_bytes"] >= SMALL]),
        ("1 to 64 MB", [row for row in rows if MB <= row["particles_bytes"] < SMALL]),
        ("less than 1 MB", [row for row in rows if row["particles_bytes"] < MB]),
    ):
        if chosen:
            print(f"    {text:15} {max(max(r['allocated_multiple'], r['resident_multiple'] or 0) for r in chosen):.2f}")
    about = {"seeds": [SEED], "threads": 1, "rounds": args.rounds, "limit": LIMIT}
    write_json(args.json, about | {"rows": rows})


def _times(n: int, ds: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Times for one n and all d, in turns."""
    arrays = [(*_arrays(n, d), torch.randn(n, n)) for d in ds]
    calls: list[tuple[Callable[[], object], Callable[[], object]]]
    calls = [(partial(_transport, h, g), partial(_floor, h, g, c)) for h, g, c in arrays]
    repeats = [[_repeats(call) for call in pair] for pair in calls]
    seconds = [  # [round][d] = time of transport, time of the floor
        [[_seconds(call, k) for call, k in zip(pair, ks, strict=True)] for pair, ks in zip(calls, repeats, strict=True)]
        for _ in range(rounds)
    ]
    return [
        {
            "n": n,
            "d": d,
            "rank": min(5, n),
            "particles_bytes": 4 * n * d,
            "seconds": median(r[i][0] for r in seconds),
            "time_over_tenth": median(r[i][0] / r[i - 1][0] for r in seconds) if i else None,
            "time_over_floor": median(r[i][0] / r[i][1] for r in seconds),
        }
        for i, d in enumerate(ds)
    ]


def _memory(cases: list[tuple[int, int]]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    _transport(*_arrays(max(n for n, _ in cases), 1000))
    resident = [peak_resident(partial(_transport, *_arrays(*case))) for case in cases]
    allocated = [
        peak_allocated(partial(_transport, *_arrays(*case))) for case in cases
    ]  # last: the profiler keeps memory
    return [
        {
            "allocated_bytes": a,
            "allocated_multiple": a / (4 * n * d),
            "resident_bytes": r,
            "resident_multiple": None if r is None or 4 * n * d < SMALL else r / (4 * n * d),
        }
        for (n, d), r, a in zip(cases, resident, allocated, strict=True)
    ]


def _transport(h: Tensor, g: Tensor) -> Tensor:
    return ff.transport(h, g, prior=PRIOR, rank=min(5, h.shape[0]))


def _floor(h: Tensor, g: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    return g @ g.T, h @ g.T, c @ g


def _arrays(n: int, d: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(n, d, generator=generator), torch.randn(n, d, generator=generator)


def _repeats(call: Callable[[], object]) -> int:
    """Number of calls that take at least 20 ms; also the warm-up."""
    call()
    return max(1, round(0.02 / _seconds(call, 1)))


def _seconds(call: Callable[[], object], repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - start) / repeats


def _size(row: dict[str, Any], kind: str) -> str:
    size, multiple = row[f"{kind}_bytes"], row[f"{kind}_multiple"]
    text = "–" if size is None else f"{size / MB:6.1f} MB"
    return f"{text:>9} {'' if multiple is None else f'{multiple:.2f}×':6}"


if __name__ == "__main__":
    main()
