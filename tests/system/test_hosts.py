"""Two hosts, simulated by two network namespaces of one machine with a virtual cable between them."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.meshes import command, finish, start
from helpers.short_runs import same, weights
from torch.testing import assert_close

from system.test_mesh_failures import wait_for

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


def agent(
    host: tuple[str, str, str], out: Path, options: tuple[str, ...] = ("--nnodes=2",), **environment: str
) -> subprocess.Popen:
    name, interface, address = host
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29400", f"--local-addr={address}"]
    is_host = int(address == ADDRESSES[0])  # no host name has this address
    rendezvous.append(f"--rdzv-conf=is_host={is_host},last_call_timeout=1,keep_alive_interval=1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node=1", *rendezvous]
    command = [*torchrun, "-m", "featureflock", *RUN, "--mesh.timeout", "60", "--out", out]
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *command],
        env={**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1", **environment},
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


JOIN_AND_LEAVE = """
import os
import signal
import time
from featureflock.training.loop import _Loop

original = _Loop._step

def step(self, batch):
    starts = len(self.run.read_environment())
    while starts == 1 and self.state.step == 5 and not self.signals:
        time.sleep(0.1)  # until torchrun stops this process, because the other host has joined
    if starts == 2 and self.state.step == 12 and os.environ["HOST"] == "1":
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    original(self, batch)

_Loop._step = step
"""


def test_an_elastic_job_goes_on_when_a_host_joins_and_when_it_is_lost(hosts, tmp_path):
    run = tmp_path / "run"
    (tmp_path / "join_and_leave.py").write_text(JOIN_AND_LEAVE)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    options = ("--nnodes=1:2", "--max-restarts=1")
    extra = {"PYTHONPATH": path, "FEATUREFLOCK_PLUGINS": "join_and_leave", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = [agent(hosts[0], run, options, HOST="0", **extra)]
    try:
        wait_for(lambda: (run / "environment.json").exists())
        agents.append(agent(hosts[1], run, options, HOST="1", **extra))
        said = [process.communicate(timeout=120) for process in agents]
    finally:
        for process in agents:
            process.kill()
    assert [process.returncode for process in agents] == [0, -signal.SIGKILL], said
    starts = json.loads((run / "environment.json").read_text())
    assert [entry["compute"].get("mesh") for entry in starts] == [None, "2 × 1", None]
    assert [entry["from_step"] for entry in starts][:2] == [0, 6]
    assert 0 < 12 - starts[2]["from_step"] <= 6
    assert sum(out.count("epoch 2/2") for out, _ in said) == 1
    assert finish(start(1, tmp_path / "output", command, *RUN, "--out", tmp_path / "process")) == [0]
    assert_close(weights(run), weights(tmp_path / "process"), rtol=1e-4, atol=1e-5)
