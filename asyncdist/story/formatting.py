"""Formats what all ranks are doing as text that fits one screen: whom each rank awaits, and which are deadlocked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from asyncdist.story.facts import RankStory, Wait
from asyncdist.story.sockets import RankSocket
from asyncdist.validation import printable
from asyncdist.wording import has_or_have, ordinal, plural, ranks_in_words, seconds_in_words

#: Maximum number of ranks whose details are all shown. In larger jobs, only ranks that compute or block have details.
DETAIL_COUNT_MAX: Final = 8
#: Maximum number of groups of ranks with the same state that are shown.
GROUP_COUNT_MAX: Final = 24
TASK_COUNT_MAX: Final = 4
#: Maximum number of ranks for which the age of the last message is shown.
HEARD_COUNT_MAX: Final = 8


#: Reasons why a rank does not answer, keyed by the state of its process (a letter as in ``ps``).
_SILENCE: Final = {
    "T": "it is stopped, by SIGSTOP or Ctrl-Z",
    "t": "it is stopped, by a debugger",
    "D": "it waits in the kernel, for a disk or a network drive",
    "": "it is stopped, or is in compiled code that holds the GIL",
}


def summarize(story: RankStory, stories: Mapping[int, RankStory]) -> str:
    """Describe what a rank's ``main`` is doing, in one line."""
    return printable(_describe_main(story, {**stories, story.rank: story}))


def describe_rank(story: RankStory) -> str:
    """Describe what one rank is doing, in several lines."""
    own = {story.rank: story}
    lines = [f"rank {story.rank} (of {story.size}, pid {story.pid}) {_describe_main(story, own)}"]
    return "\n".join(map(printable, [*lines, *_details(story, own)]))


def describe_job(stories: Mapping[int, RankStory], silent: Sequence[RankSocket] = ()) -> str:
    """Describe, in several lines, what each rank on this host is doing and which ranks it is waiting for.

    ``silent`` are the ranks on this host that have not answered.
    """
    some = next(iter(stories.values()), None)
    if some is None:
        return "\n".join(printable(_describe_silent(each, stories)) for each in silent)
    count = len(stories) + len(silent)
    here = f", {count} of them" if count < some.size else ""
    lines = [f"job {some.job}: {some.program}, {plural(some.size, 'rank')}{here} on {some.hostname}"]
    lines += [f"  {_describe_silent(each, stories)}" for each in silent]
    stuck = stuck_ranks(stories)
    ring = cycle(stuck, stories)
    if ring:
        pairs = zip(ring, (*ring[1:], ring[0]), strict=True)
        lines.append(f"  deadlock: {', '.join(f'rank {rank} waits for rank {needed}' for rank, needed in pairs)}")
    lines += _messages_on_other_tags(stories)
    groups = _groups(stories)
    for text, ranks in groups[:GROUP_COUNT_MAX]:
        lines.append(f"  {ranks_in_words(ranks)} {text if len(ranks) == 1 else _of_many(text)}")
        if len(stories) <= DETAIL_COUNT_MAX or stories[ranks[0]].state in ("computes", "blocks"):
            lines += [f"    {line}" for line in _details_of_all(ranks, stories)]
    if len(groups) > GROUP_COUNT_MAX:
        lines.append(f"  and {len(groups) - GROUP_COUNT_MAX} more")
    known = {*stories, *(each.rank for each in silent), *some.lost, *some.vacant, *some.left}
    others = some.size - len(known)
    if others > 0 and len({story.hostname for story in stories.values()}) == 1:
        where = "is on another host, or has ended" if others == 1 else "are on other hosts, or have ended"
        lines.append(f"  {plural(others, 'more rank')} {where}: run asyncdist story {some.job} there")
    return "\n".join(map(printable, lines))


def _groups(stories: Mapping[int, RankStory]) -> list[tuple[str, list[int]]]:
    """Return pairs of a wait's description and the waiting ranks. Waits that differ only in duration are merged."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in in_display_order(stories):
        story = stories[rank]
        ageless = replace(story, still_s=0.0, waits=tuple(replace(wait, seconds=None) for wait in story.waits))
        groups.setdefault((story.state, _describe_main(ageless, stories)), []).append(rank)
    return [(_describe_main(stories[ranks[0]], stories), ranks) for ranks in groups.values()]


def _of_many(text: str) -> str:
    verb, rest = re.split(r"(?!\w)", text, maxsplit=1)
    plural = {
        "waits": "wait",
        "blocks": "block",
        "computes": "compute",
        "has": "have",
        "runs": "run",
        "is": "are",
    }
    return f"{plural.get(verb, verb)}{rest}"


def _describe_main(story: RankStory, stories: Mapping[int, RankStory]) -> str:
    wait = next((each for each in story.waits if each.who == "main"), None)
    if story.state in ("computes", "blocks"):
        since = f" for {seconds_in_words(story.still_s)}" if story.still_s else ""
        inner = f", there in {story.inner_line}" if story.inner_line else ""
        return f"{story.state}{since} in {story.line}{inner}: its event loop does not run"
    if story.state == "returned":
        others = [rank for rank, its in stories.items() if its.state != "returned"]
        rest = f"; {ranks_in_words(others)} {has_or_have(others)} not" if others else ""
        return f"has returned from main{_since(wait)}{rest}"
    return "runs" if wait is None else _describe_wait(wait, story, stories)


def _since(wait: Wait | None) -> str:
    return "" if wait is None or wait.seconds is None else f" {seconds_in_words(wait.seconds)} ago"


def _describe_wait(wait: Wait, story: RankStory, stories: Mapping[int, RankStory]) -> str:
    line = f", in {wait.line}" if wait.line else ""
    if not wait.what:  # the task is about to run
        return f"runs{line}"
    if wait.ends_by_itself:
        return f"is in {wait.what}, which ends without other ranks{line}"
    seconds = story.still_s if wait.seconds is None else wait.seconds
    needs = awaited_ranks(wait, stories)
    what = wait.what
    if wait.tag is not None and wait.collective is None and f"tag {wait.tag}" not in what:
        what = f"{what}, tag {wait.tag}"
    if wait.collective is not None:
        what = f"{what}, the {ordinal(wait.collective.number)} collective of {len(wait.collective.ranks)} ranks"
        whom = f" for {ranks_in_words(needs)}, not there yet" if needs else ", which all ranks shown here have entered"
        if len(stories) == 1 < len(wait.collective.ranks):
            whom = " for others"
    elif needs:
        whom = f" for {'any of ' * (len(needs) > 1)}{ranks_in_words(needs)}"
    else:
        whom = ""
    return f"waits{f' {seconds_in_words(seconds)}' if seconds else ''}{whom}: {what}{line}"


def _details(story: RankStory, stories: Mapping[int, RankStory]) -> list[str]:
    tasks = [wait for wait in story.waits if wait.who != "main"]
    lines = [f"  its task {wait.who} {_describe_wait(wait, story, stories)}" for wait in tasks[:TASK_COUNT_MAX]]
    if len(tasks) > TASK_COUNT_MAX:
        lines.append(f"  and {len(tasks) - TASK_COUNT_MAX} more tasks")
    for policy in story.policies:
        metric = "" if policy.metric is None else f", metric {policy.metric:.5g}"
        role = f", {policy.role} in round {policy.round}" if policy.role else ""
        who = "it" if policy.coordinator == story.rank else f"rank {policy.coordinator}"
        leader = "" if policy.coordinator is None else f", {who} coordinates"
        name = f" {policy.name!r}" if policy.name else ""
        lines.append(f"  policy{name}: {policy.step} steps{metric}{role}{leader}")
    for channel in story.channels:
        counts = f"{channel.sent_count} sent, {channel.received_count} received, {channel.unread_count} not read"
        full = ": it is full, and receives nothing more on its tag" if channel.is_full else ""
        lines.append(f"  channel {channel.name}, tag {channel.tag}: {counts}{full}")
    lines += [f"  {text}" for text in story.unread]
    ended = [rank for rank in story.left if rank not in stories]
    for what, ranks in (("lost", story.lost), ("not joined yet", story.vacant), ("ended", ended)):
        if ranks:
            lines.append(f"  {what}: {ranks_in_words(ranks)}")
    needs = {rank for wait in story.waits for rank in awaited_ranks(wait, stories)}
    heard = [f"{rank} {seconds_in_words(age)} ago" for rank, age in story.heard.items() if rank in needs]
    if heard:
        lines.append(f"  last message from rank {', '.join(heard[:HEARD_COUNT_MAX])}")
    if story.events:
        lines.append(f"  lately: {'; '.join(story.events)}")
    return lines


def _details_of_all(ranks: Sequence[int], stories: Mapping[int, RankStory]) -> list[str]:
    """Return the details of ranks in the same state, as lines, with equal lines merged."""
    told: dict[tuple[str, int], list[int]] = {}
    for rank in ranks:
        counts: Counter[str] = Counter()
        for line in _details(stories[rank], stories):
            told.setdefault((line.strip(), counts[line]), []).append(rank)
            counts[line] += 1
    return [line if len(ranks) == 1 else f"{ranks_in_words(its)}: {line}" for (line, _), its in told.items()]


def _describe_silent(silent: RankSocket, stories: Mapping[int, RankStory]) -> str:
    heard = [(story.heard[silent.rank], rank) for rank, story in stories.items() if silent.rank in story.heard]
    last = "; no channel message has arrived from it" if stories else ""
    if heard:
        age, by = min(heard)
        last = f"; its last message reached rank {by} {seconds_in_words(age)} ago"
    if not silent.is_alive:
        return f"rank {silent.rank} is gone: its process {silent.pid} has ended{last}"
    why = _SILENCE.get(silent.state, "it is in compiled code that holds the GIL")
    return f"rank {silent.rank} does not answer (pid {silent.pid}): {why}{last}"


def _messages_on_other_tags(stories: Mapping[int, RankStory]) -> list[str]:
    """Return lines about channels whose messages a waiting rank cannot receive, because it has not opened their tag."""
    lines = []
    opened = {rank: {channel.tag for channel in story.channels} for rank, story in stories.items()}
    for rank, story in stories.items():
        for channel in story.channels:
            lacking = [
                other
                for other, its in stories.items()
                if other != rank and channel.tag not in opened[other] and any(w.tag in opened[other] for w in its.waits)
            ]
            if channel.sent_count and lacking:
                lines.append(
                    f"  rank {rank} has sent {channel.sent_count} on {channel.name}, tag {channel.tag}, "
                    f"which {ranks_in_words(lacking)} {has_or_have(lacking)} not opened"
                )
    return lines


def awaited_ranks(wait: Wait, stories: Mapping[int, RankStory]) -> tuple[int, ...]:
    """Return the ranks that a wait needs. For a collective, these are the members not known to have entered it."""
    collective = wait.collective
    if collective is None:
        return wait.peers
    return tuple(
        rank
        for rank in collective.ranks
        if rank not in stories or stories[rank].started.get(collective.tag, 0) < collective.number
    )


def main_needs(story: RankStory, stories: Mapping[int, RankStory]) -> tuple[int, ...]:
    """Return the ranks that ``main`` is waiting for."""
    return next((awaited_ranks(wait, stories) for wait in story.waits if wait.who == "main"), ())


def stuck_ranks(stories: Mapping[int, RankStory]) -> frozenset[int]:
    """Return the deadlocked ranks: ranks that only other deadlocked ranks could wake.

    This is the knot of the OR model (Knapp, Deadlock Detection in Distributed Databases, 1987). Every task of a
    deadlocked rank is waiting for messages from certain ranks. A rank may still make progress if it computes, blocks,
    sleeps, waits with a timeout or for a local event, has further tasks or has not answered.
    """
    stuck = {
        rank
        for rank, story in stories.items()
        if story.state == "awaits" and story.waits and not story.has_further_tasks
    }
    while True:
        movable = {
            rank
            for rank in stuck
            for wait in stories[rank].waits
            if _may_end(wait, awaited_ranks(wait, stories), stuck, stories[rank].lost)
        }
        if not movable:
            return frozenset(stuck)
        stuck -= movable


def _may_end(wait: Wait, needs: Sequence[int], stuck: Collection[int], lost: Collection[int]) -> bool:
    if wait.ends_by_itself or wait.has_deadline or not needs:
        return True
    if wait.collective is not None:  # the collective needs all of its members
        return not any(rank in stuck for rank in needs)
    return any(rank not in stuck and rank not in lost for rank in needs)


def cycle(stuck: Collection[int], stories: Mapping[int, RankStory]) -> tuple[int, ...]:
    """Return a cycle of ranks, each of which is waiting for the next, and the last for the first, or () if none."""
    for start in sorted(stuck):
        path = [start]
        while True:
            needs = [rank for rank in main_needs(stories[path[-1]], stories) if rank in stuck]
            if not needs:
                break
            following = next((rank for rank in needs if rank in path), needs[0])
            if following in path:
                return tuple(path[path.index(following) :])
            path.append(following)
    return ()


def in_display_order(stories: Mapping[int, RankStory]) -> list[int]:
    """Return the ranks in display order: first ranks that are not waiting, then ranks that many others await."""
    waiters = dict.fromkeys(stories, 0)
    for rank, story in stories.items():
        for needed in main_needs(story, stories):
            if needed in waiters and needed != rank:
                waiters[needed] += 1
    does_not_await = {rank: story.state not in ("awaits", "returned") for rank, story in stories.items()}
    return sorted(stories, key=lambda rank: (not does_not_await[rank], -waiters[rank], rank))
