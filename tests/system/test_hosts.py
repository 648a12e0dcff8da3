"""Two hosts, simulated by two network namespaces of one machine with a virtual cable between them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.meshes import command, finish, start
from helpers.short_runs import same, weights
from torch.testing import assert_close

ADDRESSES = ("10.97.31.1", "10.97.31.2")
RUN = ("train", "digits", "--members", "3", "--epochs", "2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str, str]]]:
    """Name, network interface and address of each host."""
    if shutil.which("ip") is None:
        pytest.skip("Network namespaces need the ip command of the package iproute2.")
    number = os.getpid()
    made = [
        (f"flock{number}{letter}", f"f{number}{letter}", address)
        for letter, address in zip("ab", ADDRESSES, strict=True)
    ]
    names = [name for name, _, _ in made]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", made[0][1], "netns", names[0], "type", "veth", "peer", made[1][1], "netns", names[1])
            for name, interface, address in made:
                ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
                for device in (interface, "lo"):
                    ip("-n", name, "link", "set", device, "up")
            ip("netns", "exec", names[0], "true")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"Network namespaces are not allowed here: {error.stderr.strip()}")
        yield made
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)  # also removes its interface


def agent(host: tuple[str, str, str], out: Path) -> subprocess.Popen:
    name, interface, address = host
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29400", f"--local-addr={address}"]
    rendezvous.append(f"--rdzv-conf=is_host={int(address == ADDRESSES[0])}")  # no host name has this address
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *rendezvous]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *torchrun, "-m", "featureflock", *RUN, "--mesh.timeout", "60", "--out", out],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_one_job_on_two_hosts(hosts, tmp_path):
    agents = [agent(host, tmp_path / "hosts") for host in hosts]
    try:
        said = [process.communicate(timeout=120) for process in agents]
    finally:
        for process in agents:
            process.kill()
    assert [process.returncode for process in agents] == [0, 0], said
    texts = sorted(out for out, _ in said)  # either can be rank 0
    assert texts[0] == ""
    assert texts[1].count("epoch 2/2") == 1
    assert "Computing on 2 processes, 2 × 1 (members × data)" in texts[1]
    for count, folder in ((2, tmp_path / "processes"), (1, tmp_path / "process")):
        assert finish(start(count, tmp_path / "output", command, *RUN, "--out", folder)) == [0] * count
    assert same(weights(tmp_path / "hosts"), weights(tmp_path / "processes"))
    assert_close(weights(tmp_path / "hosts"), weights(tmp_path / "process"), rtol=1e-4, atol=1e-5)
