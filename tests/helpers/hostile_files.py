"""Small files that expand to much, and files that are not regular."""

import os
import socket
import struct
import zlib
from collections.abc import Callable
from pathlib import Path


def black_png(width: int, height: int) -> bytes:
    """A PNG of black pixels, one bit each, in about a thousandth of a byte for each."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">2I5B", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((1 + (width + 7) // 8) * height))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def _socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "socket": _socket,
}
"""Functions that make a file that is not regular at a path."""
