"""Tests files that commands write atomically: through symbolic links, and after a write that fails."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncdist.report import whole_files
from asyncdist.report.whole_files import is_planted, whole_file, whole_folder
from asyncdist.trust import new_files

OWN, OTHER, ROOT = 1000, 1001, 0
LINK, PIPE, FILE = stat.S_IFLNK | 0o777, stat.S_IFIFO | 0o666, stat.S_IFREG | 0o644


def found(mode: int, owner: int) -> Any:
    return SimpleNamespace(st_mode=mode, st_uid=owner)


@pytest.mark.parametrize(
    ("kind", "owner", "folder_mode", "folder_owner", "planted"),
    [
        (LINK, OTHER, 0o1777, ROOT, True),
        (PIPE, OTHER, 0o1777, ROOT, True),
        (FILE, OTHER, 0o1777, ROOT, False),  # the kernel does not let this user write or replace the file
        (LINK, OWN, 0o1777, ROOT, False),
        (LINK, ROOT, 0o1777, ROOT, False),
        (LINK, OTHER, 0o1777, OTHER, False),  # the folder belongs to that user
        (LINK, OTHER, 0o0775, ROOT, False),
    ],
)
def test_links_of_others_in_folders_of_all(
    kind: int, owner: int, folder_mode: int, folder_owner: int, planted: bool
) -> None:
    folder = found(stat.S_IFDIR | folder_mode, folder_owner)
    assert is_planted(found(kind, owner), folder, OWN) is planted


def test_no_file_is_written_through_a_planted_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: asyncdist report, run in /tmp, overwrote the target of another user's symbolic link."""
    victim, link = tmp_path / "victim", tmp_path / "job.html"
    victim.write_text("precious")
    link.symlink_to(victim)
    monkeypatch.setattr(whole_files, "is_planted", lambda found, folder, user: stat.S_ISLNK(found.st_mode))
    refused = pytest.raises(PermissionError, match="another user created this file in a folder that all users share")
    with refused as caught, whole_file(link) as file:
        file.write_text("a page")
    assert caught.value.filename == str(link) and victim.read_text() == "precious"
    folder = tmp_path / "job-tables"
    folder.symlink_to(tmp_path)
    with pytest.raises(PermissionError), whole_folder(folder) as inside:
        (inside / "ranks.csv").write_text("")
    assert sorted(os.listdir(tmp_path)) == ["job-tables", "job.html", "victim"]


def test_a_link_of_this_user_is_followed(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "newest.html").symlink_to("pages/job.html")
    with whole_file(tmp_path / "newest.html") as file:
        file.write_text("a page")
    assert (tmp_path / "pages" / "job.html").read_text() == "a page" and (tmp_path / "newest.html").is_symlink()
    assert os.listdir(tmp_path / "pages") == ["job.html"]


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="symbolic links"), whole_file(tmp_path / "one"):
        raise AssertionError("there is no file to write")


def test_a_file_swapped_for_a_link_is_not_written_through(tmp_path: Path) -> None:
    """Regression: the owner of the folder replaced the new file by a link, and its target was overwritten."""
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text("precious")
    out.mkdir()
    with whole_file(out / "job.html") as file:
        for part in out.iterdir():
            part.rename(tmp_path / "taken")
            part.mkdir()
            (part / "job.html").symlink_to(victim)
        file.write_text("a page")
    assert victim.read_text() == "precious" and (out / "job.html").read_text() == "a page"


def test_a_folder_swapped_for_a_link_loses_no_files(tmp_path: Path) -> None:
    """Regression: the owner of the folder replaced the new folder by a link, and its target's files were moved."""
    home, out, taken = tmp_path / "home", tmp_path / "out", tmp_path / "taken"
    for each in (home, out):
        each.mkdir()
    (home / "precious").write_text("")
    with whole_folder(out) as inner:
        (part,) = out.iterdir()
        part.rename(taken)
        part.symlink_to(home)
        (inner / "ranks.csv").write_text("rank")
    assert os.listdir(home) == ["precious"] and (out / "ranks.csv").read_text() == "rank"


def test_a_new_folder_that_was_replaced_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_files, "_owner_of_new_files", lambda folder, name: os.getuid() + 1)
    with pytest.raises(PermissionError, match="another user has replaced"), whole_folder(tmp_path):
        raise AssertionError("the folder must not be used")
    assert not os.listdir(tmp_path)


def test_a_new_folder_that_became_a_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "mkdir", lambda name, mode, dir_fd: os.symlink("/", name, dir_fd=dir_fd))
    with pytest.raises(PermissionError, match=r"another user has replaced .*\.part-"), whole_file(tmp_path / "x"):
        raise AssertionError("the folder must not be used")


def test_files_in_a_groups_folder_belong_to_the_group(tmp_path: Path) -> None:
    group = 65534 if os.getuid() == 0 else os.getgroups()[-1]
    os.chown(tmp_path, -1, group)
    tmp_path.chmod(0o2775)
    before = os.umask(0o002)
    try:
        with whole_file(tmp_path / "page.html") as file:
            file.write_text("a page")
    finally:
        os.umask(before)
    found = (tmp_path / "page.html").stat()
    assert (found.st_gid, stat.S_IMODE(found.st_mode)) == (group, 0o664)


def test_an_error_names_the_file_and_not_the_descriptor(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised, whole_folder(tmp_path / "out") as inner:
        (inner / "ranks.csv").read_text()
    assert raised.value.filename == str(tmp_path / "out" / "ranks.csv") and not (tmp_path / "out").exists()
    with pytest.raises(FileNotFoundError) as raised, whole_file(tmp_path / "page.html") as file:
        raise FileNotFoundError(2, "No such file or directory", str(file))
    assert raised.value.filename == str(tmp_path / "page.html")
