"""featureflock data corrupt."""

import numpy as np
import pytest
from helpers.corrupted_files import ARRAYS, THREE, X, Y, manifest, published
from helpers.published_formats import pickled_files, write_files

from featureflock.cli.data import main
from featureflock.corruptions import (
    copy_set,
    corrupt,
    frost_source,
    open_set,
)
from featureflock.data import get

pytestmark = pytest.mark.usefixtures("temp_cache")


@pytest.fixture
def cifar(tmp_path, temp_cache):
    get("cifar10", write_files(tmp_path / "raw", pickled_files("cifar10", ARRAYS)), log=lambda text: None)


@pytest.mark.usefixtures("cifar")
def test_a_set_is_generated_in_the_cache(temp_cache, capsys):
    main(["corrupt", "cifar10", "--corruptions", *THREE, "--severities", "1", "3", "--workers", "1"])
    corrupted = open_set(temp_cache / "cifar10-c-severities13")
    assert corrupted.corruptions == THREE
    assert np.array_equal(corrupted.images("contrast", 3), corrupt(X, "contrast", 3, seed=0, indices=np.arange(7)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Frost is generated from {frost_source()}."
    assert "gaussian_noise (0 of 42 images done)" in lines
    assert lines[-1].startswith("CIFAR-10 corrupted: 3 corruptions × 2 severities, 42 images, in ")


@pytest.mark.usefixtures("cifar")
def test_published_files_are_copied(tmp_path, temp_cache, capsys):
    arrays = published(tmp_path / "theirs", count=7)
    with pytest.raises(ValueError, match="does not match the labels of the test set"):
        main(["corrupt", "cifar10", "--from", str(tmp_path / "theirs")])
    np.save(tmp_path / "theirs" / "labels.npy", np.tile(Y, 5))
    main(["corrupt", "cifar10", "--from", str(tmp_path / "theirs")])
    corrupted = open_set(temp_cache / "cifar10-c-published")
    assert corrupted.source == f"files in {tmp_path / 'theirs'}"
    for name in THREE:
        assert (corrupted.folder / f"{name}.npy").read_bytes() == (tmp_path / "theirs" / f"{name}.npy").read_bytes()
    main(["corrupt", "cifar10", "--from", str(tmp_path / "theirs"), "--out", str(tmp_path / "o"), "--severities", "4"])
    assert np.array_equal(open_set(tmp_path / "o").images("frost", 4), arrays["frost"][21:28])
    with pytest.raises(ValueError, match="cannot be copied into itself"):
        copy_set(open_set(tmp_path / "theirs"), Y, tmp_path / "theirs")


@pytest.mark.usefixtures("cifar")
def test_the_list_shows_corrupted_sets_in_the_cache(tmp_path, temp_cache, capsys):
    main(["list"])
    assert "severities" not in capsys.readouterr().out
    main(["corrupt", "cifar10", "--corruptions", "fog", "contrast", "--severities", "1", "3", "--workers", "1"])
    published(temp_cache / "CIFAR-10-C")
    published(temp_cache / "truncated", names=["fog"])
    (temp_cache / "truncated" / "fog.npy").write_bytes((temp_cache / "truncated" / "fog.npy").read_bytes()[:-1])
    (temp_cache / "begun").mkdir()
    manifest(temp_cache / "begun")
    (temp_cache / "something else").mkdir()
    capsys.readouterr()
    main(["list"])
    rows = {line.split()[0]: " ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()}
    size = 2 * (14 * 3072 + 128) / 1e6
    assert rows["cifar10-c-severities13"] == (
        f"cifar10-c-severities13 28 {size:.1f} MB 2 corruptions, severities 1 3 made by featureflock"
    )
    assert rows["CIFAR-10-C"] == "CIFAR-10-C 60 0.2 MB 3 corruptions, severities 1 2 3 4 5 published files"
    assert rows["truncated"].startswith("truncated ? damaged")
    assert rows["begun"].startswith("begun 0 unfinished")
    assert "something" not in rows
    assert "Corrupt its test images: featureflock data corrupt NAME" in rows.values()


def test_the_command_without_data_or_with_a_wrong_name(capsys):
    with pytest.raises(FileNotFoundError, match="CIFAR-10 is not in the cache; run: featureflock data get cifar10"):
        main(["corrupt", "cifar10"])
    with pytest.raises(ValueError, match=r"MNIST is in grey, but .* need colour images; use cifar10 and cifar100"):
        main(["corrupt", "mnist"])
    with pytest.raises(ValueError, match="There is no data set 'cifar11'; did you mean cifar10"):
        main(["corrupt", "cifar11"])
