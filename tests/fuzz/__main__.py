"""Fuzz all targets for some minutes, with other random cases each time.

    python -m fuzz --minutes 8 --json ../fuzz.json         in tests/; `make fuzz` does so

Prints the counts of what was tried, and fails if a case is neither a result nor a sentence. Memory is limited, so that
a case that takes more than is reasonable is a fault too.
"""

import argparse
import json
import os
import resource
import tempfile
import traceback
from pathlib import Path

import torch

MEMORY = 6 * 2**30
"""Bytes of address space beyond that at the start."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.fsync = lambda file: None
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FEATUREFLOCK_CACHE"] = cache
        faults = _fuzz(options.minutes, options.json)
    raise SystemExit(1 if faults else 0)


def _fuzz(minutes: float, path: Path | None) -> int:
    from featureflock.utils.provenance import provenance
    from fuzz import api, readers  # noqa: F401 — registers the targets
    from fuzz.attempts import COUNTS, TARGETS, fuzz_for

    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    faults = dict.fromkeys(TARGETS, 0)
    for title in TARGETS:
        try:
            fuzz_for(title, 60 * minutes / len(TARGETS))
        except Exception:
            faults[title] += 1
            traceback.print_exc()
    rows = [
        {"target": title, "tried": counts.total(), **{key: counts[key] for key in ("results", "refused")}}
        | {"faults": faults[title]}
        for title, counts in COUNTS.items()
    ]
    print(table(rows))
    if path is not None:
        path.write_text(json.dumps({**provenance(), "minutes": minutes, "rows": rows}, indent=1) + "\n")
    return sum(faults.values())


def table(rows: list[dict[str, object]]) -> str:
    """The counts as a Markdown table."""
    columns = ("tried", "results", "refused", "faults")
    total = {"target": "**all**"} | {name: sum(int(str(row[name])) for row in rows) for name in columns}
    lines = ["| target | tried | results | refused | faults |", "|---|" + "---:|" * len(columns)]
    lines += [
        f"| {row['target']} | " + " | ".join(f"{row[name]:,}" for name in columns) + " |" for row in [*rows, total]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
