"""Finds which ranks each rank waits for, and which ranks are deadlocked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from asyncdist.story.facts import RankStory, Wait


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
    """Return the ranks that main waits for."""
    return next((awaited_ranks(wait, stories) for wait in story.waits if wait.who == "main"), ())


def stuck_ranks(stories: Mapping[int, RankStory]) -> frozenset[int]:
    """Return the deadlocked ranks: ranks that only other deadlocked ranks could wake.

    This is the knot of the OR model (Knapp, Deadlock Detection in Distributed Databases, 1987). Every task of a
    deadlocked rank waits for messages of certain ranks. A rank that computes, blocks, sleeps, waits with a timeout or
    for a local event, has further tasks or has not answered may make progress.
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
    """Return a cycle of ranks in which each waits for the next, and the last for the first, or () if there is none."""
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
    """Return the ranks in display order: ranks that do not wait first, then ranks for which many others wait."""
    waiters = dict.fromkeys(stories, 0)
    for rank, story in stories.items():
        for needed in main_needs(story, stories):
            if needed in waiters and needed != rank:
                waiters[needed] += 1
    does_not_await = {rank: story.state not in ("awaits", "returned") for rank, story in stories.items()}
    return sorted(stories, key=lambda rank: (not does_not_await[rank], -waiters[rank], rank))
