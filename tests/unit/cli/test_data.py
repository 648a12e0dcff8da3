"""featureflock data get and list."""

import re

import pytest
from helpers.published_formats import pickled_files, random_arrays, write_files

from featureflock.cli.data import main

pytestmark = pytest.mark.usefixtures("temp_cache")


def test_get_and_list(tmp_path, temp_cache, capsys):
    folder = write_files(tmp_path / "mine", pickled_files("cifar10", random_arrays("cifar10")))
    main(["get", "cifar10", "--from", str(folder)])
    assert capsys.readouterr().out.splitlines() == [
        "reading mine …",
        "Stored as a custom version of CIFAR-10: 10 + 4 images instead of 50,000 + 10,000.",
        f"CIFAR-10: 10 + 4 images from files in {folder}, cached in {temp_cache / 'cifar10.safetensors'}",
        "Next: featureflock train cifar10-small",
    ]
    (temp_cache / "mnist.safetensors").write_bytes(b"nonsense")
    main(["list"])
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert re.search(r"10 \+ 4 +0\.0 MB +custom version of CIFAR-10 +files in ", rows["cifar10"])
    assert re.search(r"50,000 \+ 10,000 +no +.* the official archive", rows["cifar100"])
    assert "damaged" in rows["mnist"]
    assert "dataset-fashion-mnist" in out
    assert f"Cache folder: {temp_cache} (set FEATUREFLOCK_CACHE to change it)" in out
    assert "featureflock data get NAME --from FOLDER" in out


def test_progress_is_printed_in_lines_without_a_terminal(server, served, capsys):
    main(["get", "cifar10"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cifar-10-python.tar.gz …"
    assert "cifar-10-python.tar.gz: 100 % of 0.2 MB" in lines
    assert lines[-2].startswith("CIFAR-10: 40 + 10 images from the official archive, cached in /")


def test_progress_bars_in_a_terminal(server, served, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    main(["get", "cifar10"])
    assert "CIFAR-10: 40 + 10 images" in capsys.readouterr().out


def test_a_similar_name_is_suggested():
    with pytest.raises(ValueError, match=r"There is no data set 'fashion'; did you mean fashion-mnist\?"):
        main(["get", "fashion"])
