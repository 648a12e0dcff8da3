"""Library calls leave malloc alone; `reuse_freed_memory` changes it. Measured in page faults per page allocated."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from torch import nn
import featureflock as ff
from featureflock.cpu_kernels.malloc import reuse_freed_memory

torch.set_num_threads(1)

def faults_per_page(megabytes=64):  # above the largest threshold of glibc, 32 MB
    def faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.zeros(megabytes, 2**18)
    before = faults()
    for _ in range(5):
        torch.zeros(megabytes, 2**18)
    return (faults() - before) / 5 / (megabytes * 2**20 / resource.getpagesize())

x, y = torch.randint(0, 255, (20, 1, 4, 4), dtype=torch.uint8), torch.arange(20) % 2
recipe = ff.training.Recipe(
    data=ff.data.CustomData((x, y), (x, y)), model=ff.models.MLPConfig((4,)), members=2, epochs=1, batch=10
)
ff.training.train(recipe, sys.argv[1])
ens = ff.Ensemble([nn.Linear(4, 4) for _ in range(2)], nn.Linear(4, 2))
ens.for_inference(compile=False).predict(torch.randn(3, 4))
print(faults_per_page())
reuse_freed_memory()
print(faults_per_page())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_library_calls_leave_malloc_alone(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    after_library_calls, after_opting_in = map(float, run.stdout.split())
    assert after_library_calls > 0.9  # every block comes from the system again
    assert after_opting_in < 0.1
