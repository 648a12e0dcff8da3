"""Provenance of results: machine, versions, command and commit."""

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from featureflock.version import __version__


def provenance() -> dict[str, Any]:
    """Return the date, command, commit, versions and machine, to be stored with every result."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join([Path(sys.argv[0]).name.replace("__main__.py", "python -m featureflock"), *sys.argv[1:]]),
        "commit": _commit(),
        "versions": {"featureflock": __version__, "python": platform.python_version(), "torch": torch.__version__},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": _processor(),
            "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def _commit() -> str | None:
    """Return the commit of the source tree, with a + if it has uncommitted changes; None for an installed package."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head, changes = (
            subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=True).stdout.strip()
            for args in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + "+" * bool(changes)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
