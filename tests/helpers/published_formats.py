"""Small random data sets in the published formats, and a server that serves them with faults."""

import dataclasses
import hashlib
import http.server
import io
import json
import struct
import tarfile
import threading

import numpy as np
import torch
from PIL import Image

from featureflock.data.sources import registry
from featureflock.data.sources.cache import load
from featureflock.data.sources.registry import PUBLISHED_SETS

OFFICIAL = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}


# ---- data sets


def change_entry(monkeypatch, name, **changes):
    """Change fields of a published set for one test."""
    monkeypatch.setitem(PUBLISHED_SETS, name, dataclasses.replace(PUBLISHED_SETS[name], **changes))


def random_arrays(name, train=10, test=4, seed=0):
    """Random images and labels in the shape of a published set."""
    rng = np.random.default_rng(seed)
    published = PUBLISHED_SETS[name]
    return {
        "train_x": rng.integers(0, 256, (train, *published.shape), dtype=np.uint8),
        "train_y": rng.integers(0, published.classes, train).astype(np.uint8),
        "test_x": rng.integers(0, 256, (test, *published.shape), dtype=np.uint8),
        "test_y": rng.integers(0, published.classes, test).astype(np.uint8),
    }


def python2_pickle(batch):
    """A pickle as Python 2's cPickle wrote it with protocol 2: byte strings as keys, numpy.core as the module."""

    def string(text):
        text = text.encode() if isinstance(text, str) else text
        return b"T" + struct.pack("<i", len(text)) + text

    out = b"\x80\x02}("
    for key, value in batch.items():
        out += string(key)
        if isinstance(value, np.ndarray):
            shape = b"".join(b"J" + struct.pack("<i", n) for n in value.shape) + b"\x86"
            out += b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
            out += b"(K\x01" + shape + b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
            out += b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89" + string(value.tobytes()) + b"tb"
        elif isinstance(value, list):
            out += b"](" + b"".join(b"K" + bytes([n]) for n in value) + b"e"
        else:
            out += string(value)
    return out + b"u."


def planes(x):
    """Images as rows of red, green and blue planes."""
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)).reshape(len(x), -1)


def pickled_files(name, arrays, dump=python2_pickle):
    """Names and contents of the official files."""
    if name == "cifar100":
        return {
            split: dump(
                {
                    "data": planes(arrays[f"{split}_x"]),
                    "fine_labels": arrays[f"{split}_y"].tolist(),
                    "coarse_labels": (arrays[f"{split}_y"] // 5).tolist(),
                }
            )
            for split in ("train", "test")
        }
    xs, ys = np.array_split(arrays["train_x"], 5), np.array_split(arrays["train_y"], 5)
    parts = {f"data_batch_{i}": part for i, part in enumerate(zip(xs, ys, strict=True), 1)}
    parts["test_batch"] = (arrays["test_x"], arrays["test_y"])
    return {
        key: dump({"batch_label": "a batch", "labels": y.tolist(), "data": planes(x)}) for key, (x, y) in parts.items()
    }


def png_files(arrays):
    """Names and contents of the files of the npm package: one image per row of a PNG."""
    out = {}
    for i, x in enumerate([*np.array_split(arrays["train_x"], 5), arrays["test_x"]], 1):
        stream = io.BytesIO()
        Image.fromarray(x.reshape(len(x), -1, 3)).save(stream, "PNG")
        out[f"data_batch_{i}.png" if i < 6 else "test_batch.png"] = stream.getvalue()
    for split in ("train", "test"):
        out[f"{split}_lables.json"] = json.dumps(arrays[f"{split}_y"].tolist()).encode()
    return out


def idx_files(arrays):
    """Names and contents of the four idx files."""
    out = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        x, y = arrays[f"{split}_x"][..., 0], arrays[f"{split}_y"]
        out[f"{prefix}-images-idx3-ubyte"] = b"\0\0\x08\x03" + struct.pack(">3I", *x.shape) + x.tobytes()
        out[f"{prefix}-labels-idx1-ubyte"] = b"\0\0\x08\x01" + struct.pack(">I", len(y)) + y.tobytes()
    return out


def write_files(folder, contents):
    """Write files by name into a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return folder


def tar_of(contents, inner):
    """A .tar.gz of files in the folder `inner`."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, data in contents.items():
            member = tarfile.TarInfo(f"{inner}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def assert_cached(name, arrays):
    """Check that the cache has these arrays, and return them."""
    cached = load(name)
    for split in ("train", "test"):
        x, y = getattr(cached, f"{split}_x"), getattr(cached, f"{split}_y")
        assert torch.equal(x, torch.from_numpy(arrays[f"{split}_x"]).permute(0, 3, 1, 2))
        assert x.dtype == torch.uint8
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert y.dtype == torch.int64
        assert y.tolist() == arrays[f"{split}_y"].tolist()
    return cached


def unordered(arrays, name="cifar10"):
    """Order-independent digests, computed naively: SHA-256 of the sorted digests of (class, 0, image)."""
    found, names = {}, PUBLISHED_SETS[name].class_names
    for split in ("train", "test"):
        parts = []
        for image, label in zip(arrays[f"{split}_x"], arrays[f"{split}_y"], strict=True):
            parts.append(hashlib.sha256(names[label].replace(" ", "_").encode() + bytes(1) + image.tobytes()).digest())
        found[split] = hashlib.sha256(b"".join(sorted(parts))).hexdigest()
    return found


def digests(arrays):
    """SHA-256 of each array."""
    return {key: hashlib.sha256(array.tobytes()).hexdigest() for key, array in arrays.items()}


# ---- the server


class Server:
    """Serves `content` at /<behaviour>/<file name>."""

    def __init__(self):
        self.content, self.requests, self.resume, self.both = b"", [], threading.Event(), threading.Barrier(2)
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.requests.append(self.path)
                outer.answer(self, self.path.split("/")[1])

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, request, behaviour):
        if behaviour == "missing":
            request.send_error(404)
            return
        if behaviour == "moved":
            request.send_response(302)
            request.send_header("Location", "/complete/file")
            request.end_headers()
            return
        body = self.content
        if behaviour == "corrupted":
            body = body[:100] + bytes([body[100] ^ 1]) + body[101:]
        request.send_response(200)
        if behaviour not in ("without-length", "without-length-truncated"):
            request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if behaviour == "together":
            self.both.wait(60)
        half = len(body) // 2
        try:
            request.wfile.write(body[:half])
            request.wfile.flush()
            if behaviour == "stalls":
                self.resume.wait(60)
            if not behaviour.endswith("truncated"):
                request.wfile.write(body[half:])
        except OSError:
            pass

    def close(self):
        self.resume.set()
        self.server.shutdown()
        self.server.server_close()


def web_source(server, behaviour, title=None):
    """The source of CIFAR-10 on the server."""
    source = registry.web(
        f"{server.address}{behaviour}/", {OFFICIAL["cifar10"]: hashlib.md5(server.content).hexdigest()}
    )
    return dataclasses.replace(source, title=title or source.title)


# ---- files left by killed processes


def partial_files(folder):
    """Unfinished files and folders."""
    return [path for path in folder.iterdir() if path.suffix == ".partial"]
