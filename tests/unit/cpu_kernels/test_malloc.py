"""Released memory is kept while it is wanted, and only then. Counted in pages that the system has to hand out."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from featureflock.cpu_kernels.malloc import keeping_memory

torch.set_num_threads(1)

def pages(megabytes):
    def faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):  # until pieces of the right size have been put together
        torch.zeros(megabytes, 2**18)
    before = faults()
    for _ in range(5):
        torch.zeros(megabytes, 2**18)
    return (faults() - before) / 5 / (megabytes * 2**20 / resource.getpagesize())

with keeping_memory():
    pass
print(pages(8), pages(256))
with keeping_memory():
    print(pages(8), pages(256))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told anything")
def test_blocks_are_kept_meanwhile_and_large_ones_returned_afterwards():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    afterwards, meanwhile = ([float(share) for share in line.split()] for line in run.stdout.splitlines())
    assert max(meanwhile) < 0.1
    assert afterwards[0] < 0.1
    assert afterwards[1] > 0.9
