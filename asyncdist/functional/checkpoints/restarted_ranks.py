"""Saves the state of a restarted rank, which becomes part of the other ranks' checkpoint without any messages.

The ranks that were never lost save together. They do not wait for a restarted rank, because it may reach the same
iteration of its policy long before them, long after them, or never. It saves alone, in a folder next to the
checkpoints::

    checkpoints/
        restarted-rank-00002-1a2b3c4d-5e6f-300/     rank, job, start of the policy, and its iteration
            rank-00000.pt                           its state
            entry.json                              its moment, and its entry as in a manifest

If the others' checkpoint of the same iteration exists, the rank moves its folder into it. Otherwise, the checkpoint's
first rank moves the folder when it writes the manifest. The folder is then ``checkpoint-000003/restarted-rank-00002``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from asyncdist.functional.checkpoints import checkpoint_files, manifests
from asyncdist.functional.checkpoints.manifests import Moment
from asyncdist.runtime.world import World
from asyncdist.trust import new_files

_UNFINISHED: Final = ".part"


def moment_of(world: World, policy: Any) -> Moment | None:
    """Return the present moment, or None if ``policy`` does not count iterations."""
    iteration = getattr(policy, "iteration", None)
    if not isinstance(iteration, int):
        return None
    return Moment(f"{world.services.job}-{getattr(policy, 'start_number', 0):x}", iteration)


def position(place: Path, moment: Moment) -> Literal["ahead", "at a checkpoint", "late"]:
    """Return where a moment lies: after the run's newest checkpoint, at a checkpoint, or between older checkpoints."""
    newest = next(_checkpoints(place, moment.run), None)
    if newest is None or newest[1] < moment.iteration:
        return "ahead"
    return "late" if _checkpoint_of(place, moment) is None else "at a checkpoint"


def save(
    place: Path, moment: Moment, entry: Mapping[str, Any], write: Callable[[Path], Mapping[str, Any]]
) -> Path | None:
    """Write a restarted rank's state, and return the checkpoint to which it belongs, or None if there is none yet.

    Args:
        place: Folder of all checkpoints.
        entry: The rank's entry in a manifest, without its files.
        write: Function that writes the state to the given folder, and returns the entry's part about the files.
    """
    name = _name(entry["rank"])
    whole = place / f"{name}-{moment.run}-{moment.iteration}"
    folder = whole.with_name(whole.name + _UNFINISHED)
    for old in (whole, *place.glob(f"{name}-{moment.run}-*{_UNFINISHED}")):  # of earlier processes of this rank
        shutil.rmtree(old, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    lock = checkpoint_files.FolderLock(folder)
    try:
        files = write(folder)
        checkpoint_files.write_text(folder / manifests.ENTRY, manifests.restarted_text({**files, **entry}, moment))
        checkpoint = _checkpoint_of(place, moment)
        if checkpoint is None or not _move(folder, checkpoint):
            folder.rename(whole)
            checkpoint = _checkpoint_of(place, moment)  # It may have been completed before the folder was renamed.
            if checkpoint is not None and not _move(whole, checkpoint):
                checkpoint = None
        return checkpoint
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        lock.release()


def gather(checkpoint: Path, moment: Moment, *, deletes_others: bool) -> None:
    """Move the states of restarted ranks into a new checkpoint, and delete those that can belong to no checkpoint.

    Checkpoints of earlier iterations are complete, so that ranks move their states into them without help. If
    ``deletes_others``, states of other runs are also deleted.
    """
    for folder in checkpoint.parent.glob(f"{manifests.RESTARTED}*"):
        run, _, iteration = folder.name.split("-", 3)[-1].rpartition("-")
        if run != moment.run:
            is_useless = deletes_others and not checkpoint_files.is_locked(folder)
        elif iteration == str(moment.iteration):
            is_useless = not _move(folder, checkpoint)
        else:
            is_useless = iteration.isdecimal() and int(iteration) < moment.iteration
        if is_useless:
            shutil.rmtree(folder, ignore_errors=True)


def _checkpoint_of(place: Path, moment: Moment) -> Path | None:
    for folder, iteration in _checkpoints(place, moment.run):
        if iteration <= moment.iteration:
            return folder if iteration == moment.iteration else None
    return None


def _checkpoints(place: Path, run: str) -> Iterator[tuple[Path, int]]:
    """Yield the newest complete checkpoints with the iterations of their first ranks, until one is of another run."""
    for number in reversed(manifests.numbers(place)):
        folder = place / manifests.name_of(number)
        try:
            moment = manifests.read_moment(folder)
        except FileNotFoundError:  # it is not complete, or was just deleted
            continue
        except ValueError:
            return
        if moment is None or moment.run != run:
            return
        yield folder, moment.iteration


def _move(folder: Path, checkpoint: Path) -> bool:
    """Move a restarted rank's folder into a checkpoint. Return False if it, or the checkpoint, no longer exists."""
    with contextlib.suppress(OSError), new_files.entered(checkpoint, follows=False) as opened:
        os.rename(folder, "-".join(folder.name.split("-")[:3]), dst_dir_fd=opened)
        return True
    return False


def _name(rank: int) -> str:
    return f"{manifests.RESTARTED}{rank:05}"
