"""Whether bfloat16 is faster than float32 on this processor.

Processors without instructions for it emulate bfloat16, and are slower. Those that have them (AVX512_BF16, AMX, the
BF16 extension of Arm) differ, so a convolution and its gradients are timed.
"""

import time
from functools import cache

import torch
import torch.nn.functional as F

from featureflock.cpu_kernels.compiler import processor_info

FASTER = 1.3
"""Speed-up from which bfloat16 is used."""
_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
_ROUNDS = 5


def has_bfloat16() -> bool:
    """Return whether the processor has instructions for bfloat16; False where the system has no /proc/cpuinfo."""
    info = processor_info()
    return bool(_FLAGS & {*info.get("flags", info.get("Features", "")).split()})


@cache
def bfloat16_speedup() -> float:
    """Time of a convolution and its gradients in float32 relative to bfloat16. It is measured once, in 0.1 s."""
    dtypes = torch.float32, torch.bfloat16
    with torch.random.fork_rng([]), torch.enable_grad():
        for dtype in dtypes:
            _seconds(dtype)  # the first call prepares the kernels
        times = [[_seconds(dtype) for dtype in dtypes] for _ in range(_ROUNDS)]
    float32, bfloat16 = zip(*times, strict=True)
    return float(min(float32) / min(bfloat16))


def _seconds(dtype: torch.dtype) -> float:
    tensors = torch.randn(32, 64, 16, 16), torch.randn(64, 64, 3, 3)
    x, weight = (t.to(dtype=dtype, memory_format=torch.channels_last).requires_grad_() for t in tensors)
    start = time.perf_counter()
    F.conv2d(x, weight, padding=1).sum().backward()
    return time.perf_counter() - start
