"""Processes that form a mesh as torchrun's would, without the seconds that it takes to start them.

A process that has imported everything forks the others; each finds in its environment what torchrun would have put
there, and what it prints goes into a file of its own.
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
    """A store such as torchrun keeps for its processes; it lives as long as it is referred to."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def place(rank: int, processes: int, port: int) -> dict[str, str]:
    """What torchrun tells a process of itself."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def start(processes: int, said: Path, work: Callable[..., None], *args: Any) -> list[Any]:
    """`work(*args)` in each of so many processes; what they print is in the files 0, 1, … of the folder `said`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    said.mkdir(parents=True, exist_ok=True)
    store, started = host(), []
    for rank in range(processes):
        environment = place(rank, processes, store.port) if processes > 1 else {}
        started.append(context.Process(target=_work, args=(environment, said / str(rank), work, args)))
        started[-1].start()
        started[-1].store = store
    return started


def finish(processes: Sequence[BaseProcess], seconds: float = 120) -> list[int | None]:
    """Their exit codes; None for one that has not ended in time, which is killed."""
    for process in processes:
        process.join(seconds)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def command(*words: Any) -> None:
    """`featureflock WORDS`."""
    from featureflock.cli.main import main

    sys.argv = ["featureflock", *map(str, words)]
    main()


def _work(environment: dict[str, str], said: Path, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    with open(said, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    os.environ.update(OMP_NUM_THREADS="1", COLUMNS="200")
    torch.set_num_threads(1)
    work(*args)
