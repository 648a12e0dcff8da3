"""Fetching: from the web, from npm and from Debian. All of it ends up in a folder that the caller gives and removes.

Each function says how far it is through one callback, progress(bytes so far, bytes in all or None, what).
A source that fails raises Unavailable with a short reason, for the caller may have another source.
"""

import contextlib
import hashlib
import http.client
import os
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from featureflock.utils.files import write_atomically

DownloadProgress = Callable[[int, int | None, str], None]

_CHUNK = 1 << 18


class DownloadError(OSError):
    """A source that did not give what was asked for; the message is the reason in a few words."""


def silent(done: int, total: int | None, what: str) -> None:
    """No progress is shown."""


def from_web(
    url: str, digest: str, folder: Path, progress: DownloadProgress = silent, *, timeout: float = 30.0
) -> Path:
    """Download a file whose MD5 or SHA-256 is known; it appears in `folder` only when length and digest are right."""
    path = folder / url.rsplit("/", 1)[-1]
    host = url.split("/")[2]
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            length = answer.headers.get("Content-Length")
            total = int(length) if length is not None and length.isdecimal() else None
            write_atomically(path, _checked(answer, total, digest, path.name, progress))
    except urllib.error.HTTPError as error:
        error.close()
        raise DownloadError(f"{host} answered {error.code} {error.reason}") from None
    except (TimeoutError, urllib.error.URLError, http.client.HTTPException, ConnectionError) as error:
        raise DownloadError(f"{host}: {_why(error, timeout)}") from error
    return path


def npm_pack(package: str, version: str, folder: Path, progress: DownloadProgress = silent) -> Path:
    """Let the npm client download a package's .tgz, whose integrity it checks; nothing of it is run or installed."""
    what = f"{package}-{version}.tgz"
    # A cache of its own: people's own cache is at times not writable, and would keep a second copy for ever.
    options = [f"--cache={folder / 'npm-cache'}", "--ignore-scripts", "--loglevel=error", "--no-update-notifier"]
    retries = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=4000"]
    output = _run(["npm", "pack", f"{package}@{version}", *options, *retries], folder, what, progress)
    found = list(folder.glob("*.tgz"))
    if output is not None or len(found) != 1:
        code = re.search(r"^npm error code (\w+)", output or "", flags=re.M)
        raise DownloadError(f"npm failed with {code[1] if code else _last_line(output or '')}")
    return found[0]


def debian_package(name: str, folder: Path, progress: DownloadProgress = silent) -> Path:
    """Let apt-get download a Debian package, whose signature chain it checks, and unpack it into a folder.

    Needs no root and installs nothing. Where the machine has no package lists, they are fetched into `folder`.
    """
    apt = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "-o", "Acquire::http::Timeout=30"]
    output = _run([*apt, "download", name], folder, name, progress)
    if output is not None and "Unable to locate package" in output:
        state = folder / "apt"
        for each in ("lists/partial", "cache/archives/partial"):
            (state / each).mkdir(parents=True)
        apt += ["-o", f"Dir::State::lists={state / 'lists'}", "-o", f"Dir::Cache={state / 'cache'}"]
        output = _run([*apt, "update"], folder, "Debian's package lists", progress)
        if output is None:
            output = _run([*apt, "download", name], folder, name, progress)
    found = list(folder.glob("*.deb"))
    if output is not None or len(found) != 1:
        raise DownloadError(f"apt-get failed with: {_last_line(output or '')}")
    output = _run(["dpkg-deb", "-x", str(found[0]), "unpacked"], folder, f"unpacking {name}", progress)
    if output is not None:
        raise DownloadError(f"dpkg-deb failed with: {_last_line(output)}")
    return folder / "unpacked"


def _checked(
    answer: http.client.HTTPResponse, total: int | None, digest: str, what: str, progress: DownloadProgress
) -> Iterator[bytes]:
    """The answer in chunks; raises at its end if it was not what was asked for."""
    check = hashlib.new({32: "md5", 64: "sha256"}[len(digest)], usedforsecurity=False)
    done = 0
    progress(done, total, what)
    while chunk := answer.read1(_CHUNK):
        check.update(chunk)
        done += len(chunk)
        progress(done, total, what)
        yield chunk
    if total is not None and done != total:
        raise DownloadError(f"the connection ended after {done:,} of {total:,} bytes of {what}")
    if check.hexdigest() != digest:
        raise DownloadError(f"{what} came with other content than published ({check.name} {check.hexdigest()})")


def _why(error: Exception, timeout: float) -> str:
    """A network error in plain words."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, socket.gaierror):
        return "name not found; is this machine online?"
    if isinstance(cause, TimeoutError):
        return f"no answer within {timeout:g} seconds"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause) or type(cause).__name__


def _run(command: list[str], folder: Path, what: str, progress: DownloadProgress) -> str | None:
    """Run a client in `folder`: None if it succeeds, else what it said. It hides its progress, but files grow."""
    program = shutil.which(command[0])
    if program is None:
        raise DownloadError(f"{command[0]} is not on this machine")
    log = folder / "client.log"
    progress(0, None, what)
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [program, *command[1:]],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(0.2)
                    break
                progress(_largest(folder), None, what)
                os.utime(folder)  # still alive, see clear_partials
        except BaseException:
            process.kill()
            process.wait()
            raise
    return None if code == 0 else log.read_text(errors="replace")


def _largest(folder: Path) -> int:
    """The size of the largest file: that which is being downloaded."""
    sizes = [0]
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            sizes.append(path.lstat().st_size)
    return max(sizes)


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("E:").strip() for line in lines if line.startswith("E:")]
    return (errors or lines or ["no word of why"])[-1]
