"""Path of a Chromium for browser tests.

In this order: the program that FEATUREFLOCK_CHROMIUM names, a Chromium on the PATH, or the one of an npm package, which
is downloaded once to ~/.cache/featureflock-tests (or to FEATUREFLOCK_TEST_CACHE).
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PACKAGE, VERSION = "@sparticuz/chromium", "147.0.0"
SHA256 = "18fe5404ce845594cd7d592fc07f37a19514079ba4d9c27192ad8b908743f16b"
REMEDY = "install Chromium (Debian package chromium) or npm, or set FEATUREFLOCK_CHROMIUM to a Chromium program"
UNBROTLI = """const fs = require("fs"), unpack = require("zlib").brotliDecompressSync;
for (const name of process.argv.slice(1)) fs.writeFileSync(name, unpack(fs.readFileSync(name + ".br")));"""
FONTS = """<fontconfig><include ignore_missing="yes">/etc/fonts/fonts.conf</include>
<dir prefix="relative">fonts</dir><cachedir prefix="xdg">fontconfig</cachedir></fontconfig>"""


def find_chromium():
    """Return the program and the environment variables it needs; skip the test if there is no Chromium."""
    if named := os.environ.get("FEATUREFLOCK_CHROMIUM"):
        if not (program := shutil.which(named)):
            raise FileNotFoundError(f"FEATUREFLOCK_CHROMIUM is {named}, which is not an executable file.")
        return program, {}
    if program := next(filter(None, map(shutil.which, NAMES)), None):
        return program, {}
    cache = os.environ.get("FEATUREFLOCK_TEST_CACHE") or Path.home() / ".cache" / "featureflock-tests"
    folder = Path(cache).absolute() / f"chromium-{VERSION}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the first process downloads, the others wait for it
            if not folder.exists():
                download_chromium(folder)
    return folder / "chromium", {"LD_LIBRARY_PATH": str(folder / "lib"), "FONTCONFIG_FILE": str(folder / "fonts.conf")}


def download_chromium(folder):
    """Unpack the npm package's Chromium beside `folder`, then rename it."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip(f"Chromium was not found, and the npm package has none for this platform: {REMEDY}")
    if missing := [tool for tool in ("npm", "node") if not shutil.which(tool)]:
        pytest.skip(f"Chromium was not found, and {' and '.join(missing)} to download it were not found: {REMEDY}")
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        pack = ["npm", "pack", f"{PACKAGE}@{VERSION}", "--loglevel=error", "--fetch-retries=1", "--pack-destination=."]
        try:
            subprocess.run(pack, cwd=scratch, check=True, capture_output=True, text=True, timeout=300)
        except subprocess.SubprocessError as error:
            reason = getattr(error, "stderr", None) or error  # a timeout has no stderr
            pytest.skip(f"Chromium was not found, and npm failed ({str(reason).splitlines()[0]}): {REMEDY}")
        (archive,) = Path(scratch).glob("*.tgz")
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != SHA256:
            raise RuntimeError(f"{PACKAGE} {VERSION} has SHA-256 {digest}, expected {SHA256}.")
        _unpack(archive, scratch)
        files = Path(scratch, "package", "bin")
        names = ["chromium", "al2023.tar", "fonts.tar"]
        subprocess.run(["node", "-e", UNBROTLI, *names], cwd=files, check=True, timeout=300)
        for name in names[1:]:
            _unpack(files / name, files)
        for name in [*names[1:], *files.glob("*.br")]:
            (files / name).unlink()
        (files / "fonts.conf").write_text(FONTS)
        (files / "chromium").chmod(0o755)
        files.rename(folder)


def _unpack(archive, folder):
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:  # Python before 3.11.4; the archive's digest was checked
            tar.extractall(folder)
