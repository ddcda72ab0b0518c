"""Tests ``Calls``: a request to a rank and its reply, errors in the callee, and callees that end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from support.facts import naming

import asyncdist as ad
from asyncdist.functional import calls as calls_module


@dataclass(frozen=True, slots=True)
class Ask:
    number: int


@dataclass(frozen=True, slots=True)
class Answer:
    number: int
    source: int


class WithoutTextError(Exception):
    def __str__(self) -> str:
        raise AttributeError("reason")


async def slowly(ask: Ask, source: int) -> Answer:
    if ask.number < -1:
        raise WithoutTextError
    if ask.number < 0:
        raise ValueError(f"{ask.number} is below 0")
    await asyncio.sleep(0.001 * (ask.number % 3))
    return Answer(2 * ask.number, source)


async def everybody_asks(world: ad.World) -> int:
    async with ad.Calls(Ask, Answer, tag=50, answer=slowly) as calls:
        others = [rank for rank in range(world.size) if rank != world.rank]
        replies = await asyncio.gather(*(calls.ask(Ask(n), others[n % len(others)]) for n in range(20)))
        assert replies == [Answer(2 * n, world.rank) for n in range(20)]
        with pytest.raises(ad.RemoteError, match=f"rank {others[0]} failed to answer: ValueError: -1 is below 0"):
            await calls.ask(Ask(-1), others[0])
        with pytest.raises(ad.RemoteError, match=r"WithoutTextError: .* raised AttributeError"):
            await calls.ask(Ask(-2), others[0])  # Regression: the rank that was asked failed.
        await ad.barrier()
    with pytest.raises(ad.ClosedError, match="inside the async with block"):
        await calls.ask(Ask(1), others[0])
    return len(replies)


def test_everybody_asks_everybody() -> None:
    assert ad.run_local(everybody_asks, ranks=3, strict=True) == [20] * 3
    for seed in range(20):
        assert list(ad.simulate(everybody_asks, ranks=4, seed=seed, strict=True).results) == [20] * 4


def test_who_answers_nobody_and_who_has_left() -> None:
    async def main(world: ad.World) -> None:
        async with ad.Calls(Ask, Answer, tag=50, answer=slowly if world.rank == 2 else None) as calls:
            if world.rank == 0:
                with pytest.raises(ad.RemoteError, match=naming("rank 1", "LocalProtocolError")):
                    await calls.ask(Ask(1), 1)
                assert await calls.ask(Ask(1), 2) == Answer(2, 0)
            await ad.barrier()
            if world.rank == 0:
                while True:
                    try:
                        await calls.ask(Ask(1), 2)
                    except ad.ClosedError as error:
                        assert "rank 2 no longer answers" in str(error)
                        break
        await ad.barrier()

    ad.run_local(main, ranks=3, strict=False)
    for seed in range(20):
        ad.simulate(main, ranks=3, seed=seed).value()


def test_one_object_may_be_entered_several_times() -> None:
    """Regression: with some seeds, a rank that had left the first block was refused in the second (ClosedError)."""

    async def main(world: ad.World) -> list[int]:
        replies, calls = [], ad.Calls(Ask, Answer, tag=50, answer=slowly)
        for number in range(3):
            async with calls:
                replies.append((await calls.ask(Ask(number), 1 - world.rank)).number)
                await ad.barrier()
        return replies

    for seed in range(20):
        assert list(ad.simulate(main, ranks=2, seed=seed, strict=True).results) == [[0, 2, 4]] * 2


def test_every_rank_is_notified_that_a_rank_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with more than 1024 ranks that took no messages, some waited forever for an answer."""
    monkeypatch.setattr(calls_module, "_CAPACITY", 1)

    async def main(world: ad.World) -> None:
        calls = ad.Calls(Ask, Answer, tag=50, answer=slowly)
        if world.rank == 0:
            async with calls:
                # After 1024 messages that a rank has not received, further messages wait.
                asks = [asyncio.ensure_future(calls.ask(Ask(0), dest)) for dest in (1, 2, 3) for _ in range(1030)]
                await asyncio.wait(asks, timeout=1.0)
                for ask in asks:
                    ask.cancel()
        else:
            await asyncio.sleep(2.0)
            async with calls:
                with pytest.raises(ad.ClosedError, match=naming("rank 0")):
                    await asyncio.wait_for(calls.ask(Ask(1), 0), 100.0)
        await ad.barrier()

    ad.simulate(main, ranks=4, seed=1).value()


def test_who_is_killed_leaves_nobody_waiting() -> None:
    async def main(world: ad.World) -> str:
        async def never(ask: Ask, source: int) -> Answer:
            await asyncio.sleep(3600)
            return Answer(0, 0)

        async with ad.Calls(Ask, Answer, tag=50, answer=never) as calls:
            if world.rank == 0:
                with pytest.raises(ad.RankLostError, match="rank 1"):
                    await calls.ask(Ask(1), 1)
                return "went on"
            await asyncio.sleep(2.0)
            return ""

    report = ad.simulate(main, ranks=3, faults=[ad.Kill(1, at_s=1.0)])
    assert report.results[0] == "went on"


def test_a_question_that_was_given_up_and_types_that_are_one() -> None:
    async def main(world: ad.World) -> None:
        async with ad.Calls(Ask, Answer, tag=50, answer=slowly) as calls:
            if world.rank == 0:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0):
                        await calls.ask(Ask(2), 1)
                assert await calls.ask(Ask(5), 1) == Answer(10, 0)
            await ad.barrier()

    ad.run_local(main, ranks=2)
    with pytest.raises(TypeError, match="must be different dataclasses, got Ask"):
        ad.Calls(Ask, Ask, tag=50)


@pytest.mark.parametrize("fault", ["a field", "an integer", "cancelled"])
def test_an_answer_that_cannot_be_sent_is_an_error_of_the_asker(fault: str) -> None:
    """Regression: the asking rank waited forever, and nothing was logged."""

    async def answer(ask: Ask, source: int) -> Answer:
        if fault == "cancelled":
            task = asyncio.ensure_future(asyncio.sleep(10))
            task.cancel()
            await task
        return Answer("text" if fault == "a field" else 1 << 70, source)  # type: ignore[arg-type]

    async def main(world: ad.World) -> str:
        said = ""
        async with ad.Calls(Ask, Answer, tag=50, answer=answer) as calls:
            if world.rank == 0:
                with pytest.raises(ad.RemoteError, match=naming("rank 1")) as raised:
                    await asyncio.wait_for(calls.ask(Ask(1), 1), 5.0)
                said = str(raised.value)
            await ad.barrier()
        return said

    said = ad.simulate(main, ranks=2, seed=1, strict=True).results[0]
    assert ("CancelledError" if fault == "cancelled" else "LocalProtocolError") in said


def test_calls_are_entered_in_one_world_after_the_other() -> None:
    """Regression: the object kept its first world, and raised ClosedError in the second."""
    calls = ad.Calls(Ask, Answer, tag=50, answer=lambda question, rank: Answer(question.number, rank))

    async def main(world: ad.World) -> int:
        async with calls:
            return (await calls.ask(Ask(world.size), 0)).number

    assert [ad.run_local(main, ranks=1) for _ in range(2)] == [[1], [1]]
