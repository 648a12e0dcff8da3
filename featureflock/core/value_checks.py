"""Checks of values that never wait for a device.

    if readable(y):                                                         # on a CPU: an error at once
        …raise ValueError(message)
    else:                                                                   # on a GPU: NaN now, the error later
        refuse_later(wrong.any(), message)

Reading a value of a GPU blocks until the GPU has computed everything before it. So nothing is read there: results that
depend on refused values are NaN, the verdict is copied in the background, and the first check after it has arrived
raises the error. Under torch.compile, and on other devices, NaN is the only sign.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class _Verdict(NamedTuple):
    has_arrived: Callable[[], bool]
    refused: Tensor
    message: str


_VERDICTS: deque[_Verdict] = deque()


def readable(x: Tensor) -> bool:
    """Whether values can be checked without delay: not on a GPU, under torch.compile or inside torch.func.vmap."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not torch._C._functorch.is_batchedtensor(x)


def refuse_later(refused: Tensor, message: str) -> None:
    """Raise ValueError at a later check if `refused`, a boolean on a GPU, is true; raise that of an earlier check."""
    if torch.compiler.is_compiling():
        return
    raise_refused()
    if refused.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        _VERDICTS.append(_Verdict(*_copy_in_background(refused), f"{message} This was found in an earlier batch."))


def raise_refused() -> None:
    """Raise the error of an earlier check on a GPU, if its verdict has arrived."""
    while _VERDICTS and _VERDICTS[0].has_arrived():
        verdict = _VERDICTS.popleft()
        if verdict.refused:
            _VERDICTS.clear()
            raise ValueError(verdict.message)


def _copy_in_background(x: Tensor) -> tuple[Callable[[], bool], Tensor]:
    """Start to copy a tensor from a GPU to the CPU; returns whether it has arrived, as a function, and the copy."""
    copy = x.to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(x.device))
    return event.query, copy
