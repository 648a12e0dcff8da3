"""Standard output and error of the command line: printing never fails, and shows no control sequences of data.

characters that the terminal cannot encode     "?"
control characters, such as ESC                "�"; a terminal also gets the colours of help pages
a closed pipe, as in featureflock … | head     the rest is not printed
another error, such as a full disk             the rest is not printed, and the command ends with an error
"""

import contextlib
import errno
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_COLOUR = re.compile(r"(\x1b\[[\d;]*m)")
_CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_NARROWEST, _WIDEST = 40, 1000
_CLOSED = (errno.EPIPE, errno.ESHUTDOWN, errno.ECONNRESET)


def printable(text: str) -> str:
    """The text with a replacement for each control character, so that a terminal shows it and obeys none of it."""
    return text if text.isprintable() else text.translate(_CONTROL)


class Output(io.TextIOBase):
    """A text stream to print to. It replaces what cannot be shown, and ends quietly when nobody reads any more."""

    def __init__(self, stream: TextIO, *, replace_controls: bool = True) -> None:
        self._stream, self._replaces = stream, replace_controls
        self.error: OSError | None = None
        self.trusted: Output = Output(stream, replace_controls=False) if replace_controls else self
        """The same stream without replacement of control characters, for text that is `printable`."""

    def write(self, text: str) -> int:
        shown = text
        if self._replaces and not text.isprintable():
            parts = _COLOUR.split(text) if self.isatty() else [text]
            parts[::2] = map(printable, parts[::2])
            shown = "".join(parts)
        self._do("write", _encodable(shown, self.encoding))
        return len(text)

    def flush(self) -> None:
        self._do("flush")

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str | None:  # type: ignore[override]
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors

    @property
    def buffer(self) -> Any:
        return self._stream.buffer

    def _do(self, method: str, *args: str) -> None:
        if self.error is not None:
            return
        try:
            getattr(self._stream, method)(*args)
        except (OSError, ValueError) as error:  # ValueError if it is closed, or an encoding is not for text
            self.error = error if isinstance(error, OSError) else OSError(errno.EPIPE, str(error))
            # What is buffered, and what other code prints, goes nowhere; Python would fail to flush it at exit.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self._stream.fileno())


@contextlib.contextmanager
def safe_output() -> Iterator[None]:
    """Print through `Output`. An error other than a closed pipe is raised as OSError at the end."""
    _reserve_descriptors()
    _limit_width()
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        out, error = (Output(nothing if stream is None else stream) for stream in before)  # None: it was closed
        sys.stdout, sys.stderr = out, error
        try:
            yield
        finally:
            out.flush()
            error.flush()
            sys.stdout, sys.stderr = before
    for problem in (out.error, out.trusted.error):
        if problem is not None and problem.errno not in _CLOSED:
            raise OSError(f"The output could not be printed ({problem.strerror}).")


def _encodable(text: str, encoding: str | None) -> str:
    """The text with "?" for characters that the encoding does not have; streams without an encoding have all."""
    if encoding is None or text.isascii():
        return text
    try:
        return text.encode(encoding, "replace").decode(encoding)
    except (UnicodeError, LookupError):
        return text.encode("ascii", "replace").decode()


def _reserve_descriptors() -> None:
    """Open descriptors 0 to 2 if they are closed, so that no file gets the number of the output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def _limit_width() -> None:
    """Make COLUMNS a number with which text can be wrapped; tables have no end in a terminal of one column."""
    for name in ("COLUMNS", "LINES"):
        value = os.environ.get(name, "")
        if not (value.isascii() and value.isdigit() and len(value) < 10 and int(value)):
            os.environ.pop(name, None)
    width = shutil.get_terminal_size().columns
    if not _NARROWEST <= width <= _WIDEST:
        os.environ["COLUMNS"] = str(min(max(width, _NARROWEST), _WIDEST))
