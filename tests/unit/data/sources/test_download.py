"""Downloads from the web, and the error messages of npm and apt-get."""

import hashlib
import os

import pytest

from featureflock.data.sources import download

pytestmark = pytest.mark.usefixtures("temp_cache")


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
@pytest.mark.parametrize("behaviour", ["complete", "without-length", "moved"])
def test_a_complete_download_reports_progress(tmp_path, server, behaviour, algorithm):
    server.content = os.urandom(700_001)
    steps = []
    path = download.from_web(
        f"{server.address}{behaviour}/thing.bin",
        hashlib.new(algorithm, server.content).hexdigest(),
        tmp_path,
        lambda *step: steps.append(step),
    )
    assert path == tmp_path / "thing.bin"
    assert path.read_bytes() == server.content
    total = None if behaviour == "without-length" else 700_001
    assert steps[0] == (0, None, "thing.bin")
    assert {step[1:] for step in steps[1:]} == {(total, "thing.bin")}
    assert steps[-1][0] == total or steps[-1][0] >= 700_001
    assert len(steps) > 3
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("truncated", r"the connection to 127\.0\.0\.1:\d+ ended before the end of thing\.bin"),
        ("without-length-truncated", r"thing\.bin does not have the published content \(its md5 differs\)"),
        ("corrupted", r"thing\.bin does not have the published content"),
        ("stalls", r"127\.0\.0\.1:\d+: no answer within 0\.2 seconds"),
        ("missing", r"127\.0\.0\.1:\d+ answered 404 Not Found"),
    ],
)
def test_a_failed_download_leaves_no_file(tmp_path, server, behaviour, reason):
    server.content = os.urandom(700_001)
    digest = hashlib.md5(server.content).hexdigest()
    with pytest.raises(download.DownloadError, match=reason):
        download.from_web(f"{server.address}{behaviour}/thing.bin", digest, tmp_path, timeout=0.2)
    assert [path for path in tmp_path.iterdir() if path.name != "cache"] == []


def test_no_server_and_no_such_host(tmp_path, server):
    server.close()
    with pytest.raises(download.DownloadError, match="Connection refused"):
        download.from_web(f"{server.address}x", "0" * 32, tmp_path)
    with pytest.raises(download.DownloadError, match=r"nowhere\.invalid: name not found; is this machine online\?"):
        download.from_web("http://nowhere.invalid/x", "0" * 32, tmp_path)


def test_why_a_package_client_failed(tmp_path, monkeypatch):
    def output(text):
        monkeypatch.setattr(download, "_run", lambda *args: text)

    output("npm error code ENOTFOUND\nnpm error more\n")
    with pytest.raises(download.DownloadError, match=r"^npm failed: ENOTFOUND$"):
        download.npm_pack("x", "1.0.0", tmp_path)
    output(None)
    with pytest.raises(download.DownloadError, match=r"^npm failed: no error message$"):
        download.npm_pack("x", "1.0.0", tmp_path)
    output("noise\nE: Failed to fetch thing\n")
    with pytest.raises(download.DownloadError, match=r"^apt-get failed: Failed to fetch thing$"):
        download.debian_package("thing", tmp_path)


def test_apt_without_package_lists_downloads_them_into_the_working_folder(tmp_path, monkeypatch):
    calls = []

    def run(command, folder, name, progress):
        calls.append(" ".join(command))
        if command[0] == "dpkg-deb":
            (folder / "unpacked").mkdir()
        elif "Dir::State::lists=" not in calls[-1]:
            return "E: Unable to locate package thing"
        elif command[-2:] == ["download", "thing"]:
            (folder / "thing_1_all.deb").touch()
        return None

    monkeypatch.setattr(download, "_run", run)
    assert download.debian_package("thing", tmp_path) == tmp_path / "unpacked"
    first, update, again, unpack = calls
    assert first.endswith("download thing")
    assert update.endswith("update")
    assert again.endswith("download thing")
    assert unpack.startswith("dpkg-deb -x")
    assert all(f"Dir::State::lists={tmp_path}" in call for call in (update, again))


def test_a_client_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(download.DownloadError, match=r"^npm is not installed$"):
        download.npm_pack("x", "1.0.0", tmp_path)
