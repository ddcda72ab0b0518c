"""Saves the state of a restarted rank, which becomes part of the other ranks' checkpoint without any messages.

The ranks that were never lost save together. They do not wait for a restarted rank, because it may reach the same
moment of its policy long before them, long after them, or never. A restarted rank saves alone, in a folder next to the
checkpoints::

    checkpoints/
        restarted-rank-00002-1a2b3c4d-5e6f-300/     rank, job, start of the policy, and its iteration
            rank-00000.pt                           its state
            entry.json                              its moment, and its entry as in a manifest

If the others' checkpoint of the same moment exists, the rank moves its folder into it. Otherwise, the checkpoint's
first rank moves the folder when it writes the manifest. The folder is then ``checkpoint-000003/restarted-rank-00002``.
On a network drive, both ranks may look too early. Each therefore also moves folders left over from earlier moments.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from asyncdist.functional.checkpoints import checkpoint_files, manifests
from asyncdist.functional.checkpoints.manifests import Moment
from asyncdist.runtime.world import World
from asyncdist.trust import new_files

logger = logging.getLogger("asyncdist.population_checkpoint")

#: Maximum number of a rank's states that may wait for a checkpoint. A rank that is further ahead saves no more states.
WAITING_COUNT_MAX: Final = 4
#: Maximum number of checkpoints that are read to find a moment's checkpoint. They may include other jobs' checkpoints.
_SEEN_COUNT_MAX: Final = 64
_NAME: Final = re.compile(
    rf"(?P<stem>{manifests.RESTARTED}\d{{5,}})-(?P<run>(?P<job>[0-9a-f]{{8}})-[0-9a-f]+)-(?P<iteration>\d+)"
    r"(_(?P<count>\d+))?(?P<unfinished>\.[0-9a-f]+\.part)?"
)
#: Errors raised if the source or target of a move is gone, or if another rank has already moved the folder.
_MOOT_ERRNOS: Final = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)


class SaveCounts:
    """Counts this rank's saves to each path at one moment, because a program may save twice at one iteration."""

    def __init__(self, _: object) -> None:
        self._last: dict[str, Moment] = {}

    def counted(self, path: Path, moment: Moment) -> Moment:
        """Return the moment with the number of earlier saves to ``path`` at this moment."""
        key = os.path.abspath(path)
        last = self._last.get(key)
        if last is not None and msgspec.structs.replace(last, count=0) == moment:
            moment = msgspec.structs.replace(moment, count=last.count + 1)
        self._last[key] = moment
        return moment


def moment_of(world: World, policy: Any, path: Path) -> Moment | None:
    """Return the moment of a save that begins now, or None if ``policy`` does not count iterations.

    A foreign object may have the same attributes with other meanings, which a manifest cannot have.
    """
    iteration = getattr(policy, "iteration", None)
    if iteration is None:
        return None
    try:
        run = f"{world.services.job}-{getattr(policy, 'start_number', 0):x}"
        rounds = tuple(getattr(policy, "completed_rounds", ()))
        moment = msgspec.convert({"run": run, "iteration": iteration, "rounds": rounds}, Moment)
    except (TypeError, ValueError):
        return None
    return world.services.shared(SaveCounts).counted(path, moment)


def waiting_count(place: Path, rank: int, moment: Moment) -> int:
    """Move or delete the rank's other states, and return the number of states that are waiting for a checkpoint."""
    count = 0
    for path, name in _folders(place):
        if name["stem"] == _stem(rank) and name["job"] == moment.run.partition("-")[0] and not name["unfinished"]:
            # All checkpoints of an earlier policy of the job are written.
            if name["run"] != moment.run or _move_to_its_checkpoint(path, place) != "it waits":
                shutil.rmtree(path, ignore_errors=True)
            else:
                count += 1
    return count


def save(
    place: Path, moment: Moment, entry: Mapping[str, Any], write: Callable[[Path], Mapping[str, Any]]
) -> Path | None:
    """Write a restarted rank's state, and return the checkpoint to which it belongs, or None if there is none yet.

    Args:
        place: Folder of all checkpoints.
        entry: The rank's entry in a manifest, without its files.
        write: Function that writes the state to the given folder, and returns the entry's part about the files.
    """
    count = f"_{moment.count}" if moment.count else ""
    whole = place / f"{_stem(entry['rank'])}-{moment.run}-{moment.iteration}{count}"
    # Delete the leftovers of an earlier process of this rank.
    for path, name in _folders(place):
        is_same = name["stem"] == _stem(entry["rank"]) and name["run"] == moment.run
        if is_same and (name["unfinished"] or path == whole):
            shutil.rmtree(path, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    folder = whole.with_name(f"{whole.name}.{secrets.token_hex(4)}.part")
    folder.mkdir()
    with checkpoint_files.locked(folder):
        try:
            files = write(folder)
            checkpoint_files.write_text(folder / manifests.ENTRY, manifests.restarted_text({**files, **entry}, moment))
            checkpoint, _ = find(place, moment)
            if checkpoint is not None and _move(folder, checkpoint):
                return checkpoint
            folder.rename(whole)
            # The checkpoint may have been completed before the folder was renamed.
            found = _move_to_its_checkpoint(whole, place)
            if found == "too late":
                logger.warning("%s is not saved: the other ranks have saved later, but not at this iteration", whole)
                shutil.rmtree(whole, ignore_errors=True)
            return found if isinstance(found, Path) else None
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def collect_states(checkpoint: Path, moment: Moment, *, deletes_others: bool) -> None:
    """Move the states of restarted ranks into a new checkpoint, and delete those that can belong to no checkpoint.

    If ``deletes_others``, states of other jobs are also deleted, unless they are being written.
    """
    place = checkpoint.parent
    for path, name in _folders(place):
        order = int(name["iteration"]), int(name["count"] or 0)
        if name["run"] == moment.run and not name["unfinished"] and order <= moment.order:
            is_useless = not isinstance(_move_to_its_checkpoint(path, place), Path)
        else:
            is_foreign = name["job"] != moment.run.partition("-")[0]
            is_useless = deletes_others and is_foreign and not checkpoint_files.is_locked(path)
        if is_useless:
            shutil.rmtree(path, ignore_errors=True)


def _folders(place: Path) -> list[tuple[Path, re.Match[str]]]:
    """Return the folders of restarted ranks that are not in a checkpoint, with the parts of their names."""
    paths = [path for path in place.glob(f"{manifests.RESTARTED}*") if not path.is_symlink()]
    return [(path, name) for path in paths if (name := _NAME.fullmatch(path.name)) is not None]


def _move_to_its_checkpoint(folder: Path, place: Path) -> Path | Literal["it waits", "too late", "it is gone"]:
    """Move a restarted rank's folder into the checkpoint of its moment, and return the checkpoint.

    If there is no such checkpoint, return whether the folder can still get one. A folder that is damaged or was just
    moved counts as gone.
    """
    try:
        moment = manifests.read_restarted(folder).moment
    except (OSError, ValueError):
        return "it is gone"
    checkpoint, is_late = find(place, moment)
    if checkpoint is None:
        return "too late" if is_late else "it waits"
    return checkpoint if _move(folder, checkpoint) else "it is gone"


def find(place: Path, moment: Moment) -> tuple[Path | None, bool]:
    """Return the checkpoint of a moment, if any, and whether the run has one of this or a later iteration."""
    is_late = False
    for folder, other in _checkpoints(place, moment.run):
        if other == moment:
            return folder, True
        if other.order < moment.order:
            break
        is_late = True
    return None, is_late


def _checkpoints(place: Path, run: str) -> Iterator[tuple[Path, Moment]]:
    """Yield a run's newest complete checkpoints and their moments."""
    for number in reversed(manifests.numbers(place)[-_SEEN_COUNT_MAX:]):
        folder = place / manifests.name_of(number)
        try:
            moment = manifests.read_moment(folder)
        except (OSError, ValueError):  # The checkpoint is not complete, was just deleted, or cannot be read.
            continue
        if moment is not None and moment.run == run:
            yield folder, moment


def _move(folder: Path, checkpoint: Path) -> bool:
    """Move a restarted rank's folder into a checkpoint, and return whether this rank has moved it."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None, "folders have such names"
    try:
        with new_files.entered(checkpoint, follows=False) as opened:
            os.rename(folder, match["stem"], dst_dir_fd=opened)
    except OSError as error:
        if error.errno not in _MOOT_ERRNOS:
            logger.warning("%s could not be moved to %s: %s", folder, checkpoint, error.strerror)
        return False
    return True


def _stem(rank: int) -> str:
    return f"{manifests.RESTARTED}{rank:05}"
