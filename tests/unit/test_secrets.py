"""Tests where the secret of a job comes from: variables and files, which must be private, and the user's own secret."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.facts import naming
from torch.distributed import HashStore, PrefixStore, TCPStore

from asyncdist import environment, local_host
from asyncdist.launch import local_ranks
from asyncdist.launchers import child_environment, job_rendezvous
from asyncdist.transports.torch_distributed.meeting import rendezvous
from asyncdist.trust import job_secret, private_folders
from asyncdist.trust.job_secret import JobSecret


def written(path: Path, mode: int, text: str = "0123456789abcdef") -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    "write, says",
    [
        (
            lambda path: written(path, 0o644),
            "has mode 0644, so other users can open it. It must belong to this user ",
        ),
        (lambda path: written(path, 0o600, "short\n"), "must have at least 16 characters, got 5"),
        (lambda path: written(path, 0o600, "0123456789abcdef\0"), "must be one line of printable text"),
        (lambda path: written(path, 0o600, "0123456789abcdef\nx"), "must be one line of printable text"),
        (lambda path: str(path), "cannot be read: No such file or directory"),
        (lambda path: str(path.parent), "is not a regular file"),
    ],
)
def test_a_file_that_is_no_secret_is_refused_in_words(write: Callable[[Path], str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refused:
        job_rendezvous.given_secret({environment.SECRET_FILE_VARIABLE: write(tmp_path / "secret")})
    assert says in str(refused.value) and "0123456789abcdef" not in str(refused.value)


def test_a_file_of_random_bytes_is_refused_in_words(tmp_path: Path) -> None:
    """Regression: asyncdist run ended with the traceback of "embedded null byte"."""
    path = tmp_path / "secret"
    path.write_bytes(bytes(range(256)))
    path.chmod(0o600)
    with pytest.raises(ValueError, match="must be one line of printable text"):
        job_rendezvous.given_secret({environment.SECRET_FILE_VARIABLE: str(path)})


def test_a_named_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "secret", 0o600)
    with pytest.raises(ValueError, match="is not a regular file"):
        job_rendezvous.given_secret({environment.SECRET_FILE_VARIABLE: str(tmp_path / "secret")})


@pytest.mark.parametrize(
    "mode, owner, reader, problem",
    [
        (0o600, 1000, 1000, ""),
        (0o400, 1000, 1000, ""),
        (0o640, 1000, 1000, "has mode 0640, so other users can open it"),
        (0o440, 0, 1000, ""),  # a Secret of Kubernetes, with an fsGroup
        (0o640, 0, 1000, ""),
        (0o440, 0, 0, ""),
        (0o660, 0, 1000, "has mode 0660, so other users can open it"),
        (0o444, 0, 1000, "has mode 0444, so other users can open it"),
        (0o600, 1000, 0, ""),  # a file of the host, in a container of root
        (0o640, 1000, 0, "has mode 0640, so other users can open it"),
        (0o600, 1001, 1000, "belongs to the user with number 1001"),
    ],
)
def test_a_secret_is_known_to_its_reader_and_root_alone(mode: int, owner: int, reader: int, problem: str) -> None:
    """Regression: the files of a Kubernetes Secret were refused, since a group may read them."""
    found = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))
    assert job_secret.why_not_secret(found, reader) == problem


def test_a_secret_is_read_through_links_to_it(tmp_path: Path) -> None:
    """Kubernetes links each name of a Secret to a folder of the newest version."""
    (tmp_path / "..2026").mkdir()
    written(tmp_path / "..2026" / "secret", 0o400)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "secret").symlink_to("..data/secret")
    environ = {environment.SECRET_FILE_VARIABLE: str(tmp_path / "secret")}
    assert job_rendezvous.given_secret(environ) == "0123456789abcdef"


def test_a_variable_comes_before_a_file_and_neither_is_needed(tmp_path: Path) -> None:
    environ = {environment.SECRET_FILE_VARIABLE: written(tmp_path / "secret", 0o600, " from a file of mine \n")}
    assert job_rendezvous.given_secret(environ) == "from a file of mine"
    environ[environment.SECRET_VARIABLE] = "from a variable of mine"
    assert job_rendezvous.given_secret(environ) == "from a variable of mine"
    assert job_rendezvous.given_secret({}) is None


def test_the_variable_is_taken_out_of_the_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_environment, "hidden", {})
    monkeypatch.setenv(environment.SECRET_VARIABLE, "a secret of some length")
    assert job_rendezvous.given_secret() == job_rendezvous.given_secret() == "a secret of some length"
    assert environment.SECRET_VARIABLE not in os.environ
    with child_environment.ranks_shown():  # as in the second call of ``run``
        assert environment.SECRET_VARIABLE not in os.environ
    assert environment.SECRET_VARIABLE not in child_environment.without_launchers({environment.SECRET_VARIABLE: "x"})


def test_a_task_of_srun_takes_the_secret_out_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: processes that such a rank started later inherited the secret."""
    monkeypatch.setattr(child_environment, "hidden", {})
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    task = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "localhost"}
    for name, text in {**task, environment.SECRET_VARIABLE: "a secret of some length"}.items():
        monkeypatch.setenv(name, text)
    first = job_rendezvous.torch_rendezvous().secret
    assert not first.is_missing
    assert environment.SECRET_VARIABLE not in os.environ
    assert job_rendezvous.torch_rendezvous().secret == first


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "environ, shares, is_loopback",
    [
        ({"MASTER_ADDR": "127.0.0.1"}, True, True),
        ({"MASTER_ADDR": "localhost"}, True, True),
        ({"MASTER_ADDR": "LocalHost"}, True, True),
        ({"MASTER_ADDR": "10.1.2.3", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, True, False),
        ({"MASTER_ADDR": "10.1.2.3", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, False, False),
        ({"MASTER_ADDR": "10.1.2.3"}, False, False),
        ({"MASTER_ADDR": "127.0.0.1", "ASYNCDIST_LOOPBACK": "0"}, True, False),
    ],
)
def test_ranks_of_one_host_share_the_secret_of_their_user(
    environ: dict[str, str], shares: bool, is_loopback: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "secret_directories", lambda _: [str(tmp_path)])
    environ = {**TORCHRUN, **environ}
    found, again = job_rendezvous.torch_rendezvous(environ), job_rendezvous.torch_rendezvous(environ)
    assert (not found.secret.is_missing, found.is_loopback) == (shares, is_loopback)
    assert found.secret == again.secret
    files = list(tmp_path.glob("*/*"))
    assert [(path.name, path.stat().st_mode & 0o777) for path in files] == [("secret", 0o600)] * shares


def test_one_job_ignores_values_of_the_users_other_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: another user copied a port between stores, and ranks of two jobs connected and averaged."""
    monkeypatch.setattr(environment, "secret_directories", lambda _: [str(tmp_path)])
    given = {environment.SECRET_VARIABLE: "a secret of some length"}
    for own in ({}, given):
        jobs = [
            job_rendezvous.torch_rendezvous({**TORCHRUN, **own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).secret
            for port in ("29500", "29500", "29501")
        ]
        sealed = jobs[0].seal("asyncdist/port", b"4711")
        assert [job.unseal("asyncdist/port", sealed) for job in jobs] == [b"4711", b"4711", None]
        groups = [job_rendezvous.secret_of_job("127.0.0.1", port, 2, own) for port in (29500, 29501)]
        assert groups[0] != groups[1]
    assert JobSecret().at_port(29500).is_missing


@pytest.mark.parametrize("variable", ["TMPDIR", "XDG_RUNTIME_DIR"])
def test_a_variable_of_one_rank_alone_leaves_the_secret_equal(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a host's ranks with separate folders, or one after ``su``, made two secrets and did not connect."""
    session = f"/run/user/{os.getuid()}"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # as that rank's TMPDIR says
    monkeypatch.setattr(os, "access", lambda *_: True)
    for has_session, first in ((True, session), (False, "/tmp")):
        monkeypatch.setattr(os.path, "isdir", lambda path, has=has_session: has or path != session)
        assert environment.shared_directories({variable: str(tmp_path)})[0] == first
        assert environment.shared_directories({})[0] == first


def test_a_host_without_a_writable_folder_has_folders_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: in a container with a read-only file system, ranks failed to start with FileNotFoundError."""
    monkeypatch.setattr(tempfile, "_get_default_tempdir", lambda: os.stat("/no/usable/temporary/directory"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert environment.shared_directories({})[-1] == "/tmp"


def test_secret_is_in_the_home_if_others_took_all_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: jobs silently had no secret if another user had made all eight folders that are tried in /tmp."""
    shared, home = tmp_path / "tmp", tmp_path / "home"
    shared.mkdir()
    home.mkdir()
    monkeypatch.setattr(environment, "shared_directories", lambda _: [str(shared)])
    for path in private_folders.candidates([str(shared)]):
        path.mkdir(mode=0o755)
    environ = {**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "HOME": str(home)}
    secrets = {job_rendezvous.torch_rendezvous({**environ, "RANK": rank}).secret for rank in "01"}
    assert len(secrets) == 1 and not secrets.pop().is_missing
    assert [path.name for path in home.glob("*/*")] == ["secret"]


def test_a_start_is_refused_if_others_took_all_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: if the user had no usable home, the job had no secret, and any process could join it."""
    monkeypatch.setattr(environment, "shared_directories", lambda _: [str(tmp_path)])
    for path in private_folders.candidates([str(tmp_path)]):
        path.mkdir(mode=0o700)
        os.chown(path, 65534, -1) if os.getuid() == 0 else path.chmod(0o755)
    environ = {**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "HOME": "/no/home", "RANK": "0"}
    with pytest.raises(ValueError, match=r"cannot be stored: .*/asyncdist-\d+-8 .*ASYNCDIST_JOB_SECRET_FILE") as raised:
        job_rendezvous.torch_rendezvous(environ)
    assert str(raised.value).count(" belongs to " if os.getuid() == 0 else "must have mode 0700") == 8


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each write fail, as on a full disk, on which folders can still be created."""

    def write(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)


@pytest.mark.usefixtures("full_disk")
def test_a_start_is_refused_if_the_secret_has_no_room(tmp_path: Path) -> None:
    """Regression: eight empty folders were left behind, and the reason was given eight times, without a folder."""
    with pytest.raises(ValueError, match="ASYNCDIST_JOB_SECRET_FILE") as raised:
        job_secret.shared([str(tmp_path)])
    assert str(raised.value).count(f"{tmp_path}: {os.strerror(errno.ENOSPC)}") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("full_disk")
def test_places_are_refused_if_the_secret_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the job started, printed a ``--join`` command that could not work, and left eight empty folders."""
    folder, script = tmp_path / "full", tmp_path / "script.py"
    folder.mkdir()
    script.touch()
    monkeypatch.setattr(environment, "secret_directories", lambda: [str(folder)])
    facts = naming("--places", folder, environment.SECRET_FILE_VARIABLE)
    with pytest.raises(local_host.LaunchError, match=facts):
        local_ranks.run(str(script), [], ranks=1, places=2, environ={})
    assert not list(folder.iterdir())


def test_a_folder_with_the_files_of_others_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    with pytest.raises(OSError), private_folders.opened(folder, makes=True):
        (folder / "file").touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert (folder / "file").exists()


def test_without_a_writable_folder_there_is_no_secret() -> None:
    assert job_secret.shared(["/no/folder", "/dev/null"]) is None


@pytest.mark.parametrize("environ, last", [({"HOME": "/a/home"}, "/a/home"), ({"HOME": "relative"}, "/tmp")])
def test_secrets_are_looked_for_in_the_home_last(environ: dict[str, str], last: str) -> None:
    assert environment.secret_directories(environ)[-1] == last
    assert last == "/tmp" or last not in environment.shared_directories(environ)


def test_a_user_without_an_entry_has_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1234567)
    assert environment.secret_directories({}) == environment.shared_directories({})


@pytest.mark.parametrize(
    "store, address",
    [
        (lambda: PrefixStore("a", PrefixStore("b", HashStore())), ""),
        (lambda: PrefixStore("a", TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)), "127.0.0.1"),
    ],
)
def test_a_programs_own_process_group_says_where_its_store_is(
    store: Callable[[], Any], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: ranks of mp.spawn, which receive rank and size as arguments, had no secret on one host."""
    found, port = rendezvous._address_of(store())
    assert (found, port > 0) == (address, address != "")
    monkeypatch.setattr(environment, "secret_directories", lambda _: [str(tmp_path)])
    assert job_rendezvous.secret_of_job(address, port, 2, {}).is_missing is (address == "")
    assert job_rendezvous.secret_of_job(address, port, 1, {}).is_missing


def test_processes_that_draw_the_users_secret_at_once_agree(tmp_path: Path) -> None:
    found: list[str | None] = []
    threads = [threading.Thread(target=lambda: found.append(job_secret.shared([str(tmp_path)]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and found[0] is not None and len(found) == 8


@pytest.mark.parametrize("text, mode", [("", 0o600), ("short", 0o600), ("0123456789abcdef", 0o644)])
def test_a_users_secret_that_cannot_be_used_is_replaced(text: str, mode: int, tmp_path: Path) -> None:
    """Regression: an empty file, as after a power failure, left all later jobs of that user without a secret."""
    assert job_secret.shared([str(tmp_path)]) is not None
    (path,) = tmp_path.glob("*/secret")
    written(path, mode, text)
    found = job_secret.shared([str(tmp_path)])
    assert found not in (None, text) and found == job_secret.shared([str(tmp_path)])
    assert path.stat().st_mode & 0o777 == 0o600 and len(list(path.parent.iterdir())) == 1


@pytest.mark.parametrize("moment", [1, 2])
def test_ranks_that_replace_the_users_secret_at_once_agree(
    moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: ranks that found an empty file replaced each other's secrets, and did not connect."""
    bases, draw, drawn, other = [str(tmp_path)], job_secret.draw, itertools.count(1), list[str | None]()
    assert job_secret.shared(bases) is not None
    (path,) = tmp_path.glob("*/secret")
    written(path, 0o600, "")

    def draw_beside_another_rank() -> str:
        if next(drawn) == moment:
            other.append(job_secret.shared(bases))
        return draw()

    monkeypatch.setattr(job_secret, "draw", draw_beside_another_rank)
    assert [job_secret.shared(bases)] == other != [None]


def test_the_secret_of_a_job_is_kept_and_removed(tmp_path: Path) -> None:
    kept = job_secret.keep(1, "0123456789abcdef", [str(tmp_path)])
    assert kept is not None and job_secret.find("secret-1", [str(tmp_path)]) == "0123456789abcdef"
    kept.path.chmod(0o644)
    assert job_secret.find("secret-1", [str(tmp_path)]) is None, (
        "a secret that another user may have read must not be used"
    )
    kept.remove()
    assert not kept.path.exists()


def test_secrets_of_killed_launchers_are_removed_by_the_next(tmp_path: Path) -> None:
    """Regression: each killed launcher with ``--places`` left its secret's file behind forever."""
    bases = [str(tmp_path)]
    assert job_secret.shared(bases)
    kept = [job_secret.keep(port, "0123456789abcdef", bases) for port in (1, 2)]
    assert kept[0] is not None and kept[1] is not None
    os.close(kept[0].lock)  # as the kernel does for a process that is killed
    last = job_secret.keep(3, "0123456789abcdef", bases)
    assert last is not None
    assert sorted(path.name for path in last.path.parent.iterdir()) == ["secret", "secret-2", "secret-3"]
    kept[1].remove()
    last.remove()


def test_a_kept_secret_outlives_its_folder_until_removed(tmp_path: Path) -> None:
    """Regression: no rank could join a job after its user's logout, which removes /run/user/UID."""
    session, common, text = tmp_path / "session", tmp_path / "common", "0123456789abcdef"
    common.mkdir()
    session.mkdir()

    def bases() -> list[str]:
        return [str(folder) for folder in (session, common) if folder.exists()]

    def wait_for(secret: str | None) -> None:
        until = time.monotonic() + 30
        while job_secret.find("secret-1", bases()) != secret:
            assert time.monotonic() < until, f"the secret {secret!r} was not found in time"
            time.sleep(0.01)

    with job_secret.kept(1, text, bases, renewal_s=0.01) as is_kept:
        assert is_kept and list(session.glob("*/secret-1"))
        session.rename(tmp_path / "logout")
        wait_for(text)
        assert list(common.glob("*/secret-1"))
        session.mkdir()
    assert job_secret.find("secret-1", bases()) is None


def test_a_secret_that_cannot_be_kept_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "rename", fail)
    assert job_secret.keep(1, "0123456789abcdef", [str(tmp_path)]) is None
    assert not list(tmp_path.glob("*/*"))
