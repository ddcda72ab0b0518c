"""Reads the manifests of checkpoints, and chooses the saved rank that each rank loads.

:mod:`asyncdist.functional.checkpoints.population_checkpoint` describes the structure of a checkpoint's folder.
"""

from __future__ import annotations

import errno
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from asyncdist._version import __version__

logger = logging.getLogger("asyncdist.population_checkpoint")

MANIFEST: Final = "manifest.json"
#: Prefix of the name of a restarted rank's folder, and the name of its entry file, which resembles a manifest.
RESTARTED: Final = "restarted-rank-"
ENTRY: Final = "entry.json"
_FORMAT: Final = "population checkpoint of asyncdist"
_VERSION: Final = 1
_PREFIX: Final = "checkpoint-"
#: Maximum size of a manifest in bytes. A rank's entry takes about 150 bytes.
_NBYTES_MAX: Final = 1 << 26
#: Maximum number of ranks of a replica.
REPLICA_SIZE_MAX: Final = 1 << 16


class _FileEntry(msgspec.Struct, frozen=True):
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
    crc32: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _RankEntry(_FileEntry, frozen=True):
    """Manifest entry of a rank: its file and, in the safetensors format, the file with its weights."""

    metric: float | None
    metric_mode: Literal["min", "max"]
    safetensors: _FileEntry | None = None
    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] | None = None
    replica_size: Annotated[int, msgspec.Meta(ge=1, le=REPLICA_SIZE_MAX)] = 1


_RankEntries: TypeAlias = Annotated[list[_RankEntry], msgspec.Meta(min_length=1, max_length=1 << 16)]


class Moment(msgspec.Struct, frozen=True):
    """Identifies when a rank saves: in which run of a policy, and after how many steps.

    Attributes:
        run: The job's name, and the number of the policy's start, because a job may start several policies.
        rounds: Numbers of completed rounds, which must be equal on ranks that continue together.
        count: Number of earlier saves to the same path with the same other values.
    """

    run: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{8}-[0-9a-f]+$", max_length=40)]
    iteration: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
    rounds: tuple[int, ...] = ()
    count: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0

    @property
    def order(self) -> tuple[int, int]:
        """The iteration and the count. They increase from one save to the next in a run."""
        return self.iteration, self.count


class RestartedRank(msgspec.Struct, frozen=True):
    """Describes a restarted rank that saved alone: when it saved, and its entry as in a manifest."""

    moment: Moment
    entry: _RankEntry


def manifest_of(entries: Sequence[Mapping[str, Any]], moment: Moment | None) -> str:
    """Return the text of a manifest."""
    facts = {"format": _FORMAT, "version": _VERSION, "asyncdist": __version__, "files": entries}
    return json.dumps(facts if moment is None else {**facts, "moment": msgspec.to_builtins(moment)}, indent=1)


def restarted_text(entry: Mapping[str, Any], moment: Moment) -> str:
    """Return the text of a restarted rank's :data:`ENTRY`."""
    return json.dumps({"moment": msgspec.to_builtins(moment), "entry": entry}, indent=1)


def stem_of(index: int) -> str:
    """Return the name, without extension, of the files at position ``index`` of a manifest."""
    return f"rank-{index:05}"


def name_of(number: int) -> str:
    """Return the name of the folder of a checkpoint."""
    return f"{_PREFIX}{number:06}"


def number_of(name: str) -> int:
    """Return the number in the name of a checkpoint's folder."""
    return int(name.removeprefix(_PREFIX))


def numbers(place: Path) -> list[int]:
    """Return the numbers of all checkpoint folders in ``place``, complete or not."""
    ends = [entry.name.removeprefix(_PREFIX) for entry in place.glob(f"{_PREFIX}*") if entry.is_dir()]
    return sorted(int(end) for end in ends if end.isdecimal() and name_of(int(end)) == _PREFIX + end)


def read_moment(folder: Path) -> Moment | None:
    """Return the moment of a complete checkpoint, or None if its first rank had no policy.

    Raises:
        FileNotFoundError: The checkpoint is not complete.
        ValueError: The manifest is damaged.
    """
    return _moment_in(_read(folder))


def find_newest(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the newest complete checkpoint in a folder and its manifest. Raise FileNotFoundError if there is none.

    Folders of other programs are ignored.
    """
    if (path / MANIFEST).is_file():
        return path, _read_manifest(path)
    folders = [path / name_of(number) for number in reversed(numbers(path))] if path.is_dir() else []
    unfinished_count = 0
    for folder in folders:
        if not (folder / MANIFEST).is_file():
            logger.warning("%s is unfinished and is ignored", folder)
            unfinished_count += 1
        elif is_ours(folder) is False:
            logger.warning("%s is not a population checkpoint and is ignored", folder)
        else:
            return folder, _read_manifest(folder)
    unfinished = f"it contains only {unfinished_count} unfinished checkpoints"
    found = unfinished if unfinished_count else "it contains no checkpoint"
    if path.name.startswith(_PREFIX) and path.is_dir():
        found = "it is an unfinished checkpoint"
    raise FileNotFoundError(f"{path} must contain a complete population checkpoint, but {found}")


def find_last(path: Path, count: int) -> list[tuple[Path, dict[str, Any]]]:
    """Return the newest ``count`` complete checkpoints in a folder and their manifests, oldest first."""
    if (path / MANIFEST).is_file():
        return [find_newest(path)]
    folders = [path / name_of(number) for number in numbers(path)]
    found = [folder for folder in folders if (folder / MANIFEST).is_file() and is_ours(folder) is not False][-count:]
    return [(folder, _read_manifest(folder)) for folder in found] or [find_newest(path)]


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest with the entries of all ranks in rank order.

    Each has the name of its files as "stem", and "was_restarted" if the rank was restarted and saved alone.
    """
    manifest = _read(folder)
    for index, entry in enumerate(manifest["files"]):
        entry["stem"] = stem_of(index)
    manifest["files"] = _with_restarted(folder, manifest["files"], _moment_in(manifest))
    return manifest


def is_ours(folder: Path) -> bool | None:
    """Return whether a folder's manifest is of a population checkpoint, or None if it is missing or damaged."""
    try:
        return _is_manifest(_parsed(folder))
    except (OSError, ValueError, RecursionError):
        return None


def _is_manifest(content: Any) -> bool:
    return isinstance(content, dict) and content.get("format") == _FORMAT


def _parsed(folder: Path) -> Any:
    with (folder / MANIFEST).open("rb") as file:
        data = file.read(_NBYTES_MAX + 1)
    return json.loads(data) if len(data) <= _NBYTES_MAX else None


def _read(folder: Path) -> dict[str, Any]:
    """Read a manifest, check it, and return it unchanged."""
    try:
        manifest = _parsed(folder)
    except (ValueError, RecursionError):
        manifest = None
    if not _is_manifest(manifest):
        raise ValueError(
            f"{folder / MANIFEST} must be the manifest of a population checkpoint, but it has other content"
        )
    if manifest.get("version") != _VERSION:
        raise ValueError(f"{folder} must have the checkpoint version {_VERSION}, got {manifest.get('version')!r:.80}")
    try:
        msgspec.convert(manifest.get("files"), _RankEntries)
        _moment_in(manifest)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{folder / MANIFEST} must describe the file of each rank: {error}") from error
    found: dict[str, Any] = manifest
    return found


def _moment_in(manifest: Mapping[str, Any]) -> Moment | None:
    return msgspec.convert(manifest.get("moment"), Moment | None)


def _with_restarted(folder: Path, files: list[dict[str, Any]], moment: Moment | None) -> list[dict[str, Any]]:
    """Add the entries of restarted ranks that saved at the same moment, and return all entries in rank order."""
    own = {saved_rank(entry, index): entry for index, entry in enumerate(files)}
    if moment is None or len(own) < len(files) or any(entry.get("replica_size", 1) != 1 for entry in files):
        return files
    for place in sorted(folder.glob(f"{RESTARTED}*")):
        if place.is_symlink():
            continue
        try:
            found = read_restarted(place)
        except (OSError, ValueError) as error:
            logger.warning("%s is damaged, so this restarted rank is ignored: %s", place, error)
            continue
        rank = found.entry.rank
        if found.moment == moment and rank is not None and rank not in own:
            added = {"stem": f"{place.name}/{stem_of(0)}", "was_restarted": True}
            own[rank] = {**msgspec.to_builtins(found.entry), **added}
    return [own[rank] for rank in sorted(own)]


def read_restarted(folder: Path) -> RestartedRank:
    """Read the entry that a restarted rank has written into its folder, and check the sizes of its files.

    Raises:
        OSError: A file is missing.
        ValueError: The entry is damaged, or a file has the wrong size.
    """
    path = folder / ENTRY
    if not path.is_file():  # opening a named pipe would block
        raise FileNotFoundError(errno.ENOENT, "it must have a regular file", str(path))
    try:
        with path.open("rb") as file:
            # The decoder of msgspec would refuse metrics that are not finite.
            found = msgspec.convert(json.loads(file.read(_NBYTES_MAX)), RestartedRank)
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    files = {".pt": found.entry, ".safetensors": found.entry.safetensors}
    for ending, entry in files.items():
        if entry is not None and (folder / f"{stem_of(0)}{ending}").stat().st_size != entry.nbytes:
            raise ValueError(f"{stem_of(0)}{ending} must have {entry.nbytes} bytes")
    return found


def saved_rank(entry: Mapping[str, Any], index: int) -> int:
    """Return the rank that saved the file at position ``index``, which is ``index`` itself in older manifests."""
    rank = entry.get("rank")
    return index if rank is None else int(rank)


def plan(files: Sequence[Mapping[str, Any]], size: int) -> list[int]:
    """Return, for each of ``size`` ranks, the saved rank whose file it loads.

    The ranks with the best metrics are chosen, and repeated if there are too few. If the saved population had replicas
    of several ranks, whole replicas are chosen by the mean metric of their ranks.
    """
    count: int = files[0].get("replica_size", 1)
    if size == len(files):
        return list(range(size))
    if len(files) % count or size % count:
        count = 1  # No whole replicas can be chosen, so choose single ranks.
    units = [files[first : first + count] for first in range(0, len(files), count)]
    return [unit * count + place for unit in _chosen(units, size // count) for place in range(count)]


def _chosen(units: Sequence[Sequence[Mapping[str, Any]]], size: int) -> list[int]:
    """Return, for each of ``size`` replicas, the saved replica that it loads.

    A replica is a list of its ranks' entries.
    """

    def quality(source: int) -> tuple[bool, float]:
        values = [each["metric"] for each in units[source]]
        if any(value is None or not -math.inf < value < math.inf for value in values):
            return False, 0.0
        value = math.fsum(value / len(values) for value in values)  # the sum of the values may be too large
        return True, -value if units[source][0]["metric_mode"] == "min" else value

    best_first = sorted(range(len(units)), key=quality, reverse=True)
    if size < len(units):
        if not any(quality(source)[0] for source in best_first):
            count = len(units[0])
            logger.warning(
                "the checkpoint has no finite metrics by which the best ranks could be chosen, so only the first %d of "
                "its %d ranks are loaded",
                size * count,
                len(units) * count,
            )
        return sorted(best_first[:size])
    return [*range(len(units)), *(best_first[i % len(units)] for i in range(size - len(units)))]
