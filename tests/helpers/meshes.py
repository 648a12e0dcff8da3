"""Start the processes of a mesh faster than torchrun.

A process that has imported everything forks the others. Each has the environment variables that torchrun would set, and
writes its output to a file.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

PRELOADED = ["featureflock.cli.train", "sklearn.datasets", "torch._dynamo", "torch.utils.flop_counter"]


def host() -> TCPStore:
    """A store such as torchrun provides; it lives as long as it is referenced."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def torchrun_environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """The environment variables that torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def start(processes: int, output: Path, work: Callable[..., None], *args: Any) -> list[Any]:
    """Call `work(*args)` in each of the processes. Their output goes to the files 0, 1, … of the folder `output`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    output.mkdir(parents=True, exist_ok=True)
    store, started = host(), []
    for rank in range(processes):
        environment = torchrun_environment(rank, processes, store.port) if processes > 1 else {}
        started.append(context.Process(target=_work, args=(environment, output / str(rank), work, args)))
        started[-1].start()
        started[-1].store = store
    return started


def finish(processes: Sequence[BaseProcess], seconds: float = 120) -> list[int | None]:
    """Return the exit codes; None for a process that has not exited in time, which is killed."""
    for process in processes:
        process.join(seconds)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def command(*words: Any) -> None:
    """Run `featureflock WORDS`."""
    from featureflock.cli.main import main

    sys.argv = ["featureflock", *map(str, words)]
    main()


def _work(environment: dict[str, str], output: Path, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    with open(output, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    os.environ.update(OMP_NUM_THREADS="1", COLUMNS="200")
    torch.set_num_threads(1)
    work(*args)
