"""Call a function with limited memory and time."""

import contextlib
import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterator


def within_memory(megabytes: int, function: Callable[[], object]) -> str:
    """Call a function in a forked process that can allocate so much memory; returns "" or its error message."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[0])
            limit = pages * os.sysconf("SC_PAGE_SIZE") + megabytes * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            signal.alarm(300)
            function()
        except (ValueError, OSError) as error:
            text = str(error) or type(error).__name__
        except BaseException:
            text = traceback.format_exc()
        finally:
            os.write(writer, text.encode()[-60_000:])
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return text if status == 0 else f"exit status {status}"


class Endless(BaseException):
    """A block took too long."""


@contextlib.contextmanager
def time_limit(seconds: int = 300) -> Iterator[None]:
    """Raise Endless in a block that takes far too long, as one that waits for a pipe."""

    def stop(*_: object) -> None:
        raise Endless(f"no end within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
