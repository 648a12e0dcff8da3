"""Several processes on one CPU, where that is faster than one: each has some of the threads and some of the members.

Threads that share an operation wait for each other at its end, processes twice in a step. On two threads that gained 6
to 8 % (docs/speed.md), so it is for long runs, and for members that can be divided equally.
"""

import logging
import math
import os
import signal
import sys
import uuid
from collections.abc import Sequence

import torch

from featureflock.data import TensorExamples
from featureflock.distributed.env import launched_by_torchrun
from featureflock.distributed.mesh import MeshShape
from featureflock.training.build import build, multiplications
from featureflock.training.compute import ComputeConfig, resolve_compute
from featureflock.training.recipe import Recipe


def best_processes(recipe: Recipe, compute: ComputeConfig) -> int:
    """How many processes would train fastest, where nothing was said of it."""
    processes = math.gcd(recipe.size, torch.get_num_threads())
    said = launched_by_torchrun() or compute.mesh != MeshShape() or compute.execution != "sequential"
    if processes == 1 or said or compute.device not in ("auto", "cpu") or torch.cuda.is_available():
        return 1
    splits = recipe.splits()
    if not isinstance(splits.train, TensorExamples):  # each process would read all files
        return 1
    ens = build(recipe, splits)
    setup = resolve_compute(compute, recipe.precision, ens, lambda: multiplications(recipe, ens, splits.train))
    return processes if setup.compile and setup.channels_last else 1


def launch(processes: int, args: Sequence[str]) -> None:
    """Run `featureflock ARGS` in so many processes with an equal share of the threads, as torchrun would."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the processes themselves say enough
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads() // processes)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "featureflock", *args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            raise OSError(f"Process {failure.pid}, rank {rank}, was ended by {name}; go on with --resume.") from None
        sys.exit(failure.exitcode)  # it has said why
    except SignalException as error:
        sys.exit(128 + error.sigval)
