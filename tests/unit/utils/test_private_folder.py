"""Folders for code that is executed: mode 0700, owned by this user, no link, not replaceable by others."""

import os
import stat
import subprocess
import sys

import pytest

from featureflock.utils.private_folder import check_private, temporary_private_folder

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no modes.")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "compiled"


def test_a_new_folder_is_private_whatever_the_umask(folder):
    before = os.umask(0)
    try:
        (folder.parent).mkdir(mode=0o755)
        check_private(folder)
    finally:
        os.umask(before)
    assert mode(folder) == 0o700
    check_private(folder)  # again


def test_a_folder_that_others_could_only_read_becomes_private(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    check_private(folder)
    assert mode(folder) == 0o700


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o722])
def test_a_folder_that_others_can_write_to_is_refused(folder, bits):
    folder.mkdir(parents=True)
    folder.chmod(bits)
    with pytest.raises(OSError, match="compiled is not private: other users can write to it"):
        check_private(folder)


def test_a_link_is_refused(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="it is a link"):
        check_private(folder)


def test_the_folder_of_another_user_is_refused(folder, monkeypatch):
    folder.mkdir(parents=True, mode=0o700)
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(OSError, match=r"is not private: (it belongs to another user|other users can replace)"):
        check_private(folder)


def test_a_parent_in_which_everybody_can_rename_is_refused(folder):
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o777)
    with pytest.raises(OSError, match=r"other users can replace what is in .*cache"):
        check_private(folder)
    folder.parent.chmod(0o1777)  # as that of temporary files: everybody can add, the owner can rename
    check_private(folder)


def test_a_file_is_refused(folder):
    folder.parent.mkdir()
    folder.write_text("")
    with pytest.raises(FileExistsError):
        check_private(folder)


def test_the_temporary_folder_is_private_and_removed():
    folder = temporary_private_folder()
    assert mode(folder) == 0o700
    assert temporary_private_folder() == folder
    code = "from featureflock.utils.private_folder import *; print(temporary_private_folder())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other != str(folder)
    assert not os.path.exists(other)
