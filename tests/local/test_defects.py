"""What must be impossible: the defects found in the reference implementation, each with its named test.

| | defect | test |
|---|---|---|
| 1 | averaged weights computed and never applied | here: test_defect_01_averaged_weights_are_applied |
| 2 | control messages to the coordinator's own rank swallowed | here: test_defect_02_control_messages_to_the_coordinators_own_rank |
| 3 | completion polled with a call that never turns true | here: test_defect_03_polling_alone_completes_what_is_outstanding |
| 4 | send requests dropped before completion | here: test_defect_04_send_requests_live_until_they_complete |
| 5 | a donor streams the model object from before its rebuild | here: test_defect_05_donor_gives_its_rebuilt_model |
| 6 | weighted mean favours the worst | unit/test_selective_rules.py: test_defect_06_weighted_mean_favours_the_best |
| 7 | a round waits for all without a deadline; incomplete rounds leak | unit/test_round_coordinator.py: test_defect_07_a_round_does_not_wait_for_all_ranks, test_defect_07_incomplete_rounds_do_not_leak |
| 8 | one tag for all rounds, so rounds mix | here: test_defect_08_chunks_of_an_abandoned_round_reach_no_other, test_defect_08_donor_aborts_other_rounds_and_keeps_buffer |
| 9 | one message, one clone, one blocking receive per parameter | here: test_defect_09_message_count_is_independent_of_parameters |
| 10 | iteration numbers in float32 | here: test_defect_10_iterations_beyond_2_to_the_24_are_exact |
| 11 | ratio 0 replaces one rank; ratio 1 averages an empty set | unit/test_selective_rules.py: test_defect_11_ratio_0_replaces_nobody, test_defect_11_ratio_1_leaves_a_donor |
| 12 | buffers and optimizer state lost; names missing or skipped silently | here: test_defect_12_buffers_arrive_and_optimizer_state_stays |
| 13 | NaN metrics taken as best | unit/test_selective_rules.py: test_defect_13_nan_is_never_taken_as_best |
| 14 | one-sided reads stall, mix versions, copy every iteration | launched/test_one_sided.py: test_every_one_sided_average_is_that_of_its_snapshots, test_defect_14_no_version_is_ever_mixed_with_another, test_defect_14_a_read_needs_no_help_of_the_one_who_is_read |
| 15 | dividing by the world's size when the group is smaller | local/test_average_all.py: test_average_all_on_a_sub_group_divides_by_its_size |
"""  # noqa: E501

from __future__ import annotations

import ast
import asyncio
import gc
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts.population import Mixed, Story, fill, identity, sgd, values
from support.local import run, yields
from torch import nn

import asyncdist as ad
from asyncdist import tags
from asyncdist.messaging import streams
from asyncdist.tensors.flat_state import FlatState
from asyncdist.transports import local, matching
from protocols import AsyncSelectiveAveragingPolicy, AverageApplied, SnapshotTaken, parameter_stream

HERE = Path(__file__).resolve()
DEFECTS = range(1, 16)


def test_every_defect_has_a_test_that_exists() -> None:
    rows = {int(row[0]): row[2] for row in re.findall(r"^\| (\d+) \|(.*?)\|(.*)\|$", __doc__ or "", re.MULTILINE)}
    assert list(rows) == list(DEFECTS)
    for number, where in rows.items():
        named = re.findall(r"test_\w+(?!\w*\.py)\b", where.replace(".py", ""))
        file = re.search(r"\w+/(test_\w+)\.py", where)
        functions = [name for name in named if file is None or name != file[1]]
        tree = ast.parse((HERE.parents[1] / file[0] if file else HERE).read_text())
        known = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert set(functions) <= known, f"defect {number}: the functions {set(functions) - known} do not exist"
        assert functions, f"defect {number} has no test"


async def until_replaced(world: ad.World, policy: Any, replaced: list[int], count: int, metric: float) -> None:
    """Train until ``count`` replacements have been seen anywhere in this process."""
    while len(replaced) < count:
        if await policy.step(metric):
            replaced.append(world.rank)


def test_defect_01_averaged_weights_are_applied() -> None:
    replaced: list[int] = []

    async def main(world: ad.World) -> set[float]:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1) as policy:
            await until_replaced(world, policy, replaced, 1, float(world.rank))
        return values(model, floating=True)

    assert run(main, 3) == [{1.5}, {1.0}, {2.0}]
    assert replaced == [0]


@pytest.mark.parametrize("worst", [0, 1])
def test_defect_02_control_messages_to_the_coordinators_own_rank(worst: int) -> None:
    """Rank 0 coordinates and receives its own messages as a replacer and as a donor."""
    replaced: list[int] = []

    async def main(world: ad.World) -> set[float]:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1) as policy:
            await until_replaced(world, policy, replaced, 3, 0.0 if world.rank == worst else 1.0)
        return values(model, floating=True)

    results = run(main, 2)
    assert set(replaced) == {worst}
    assert results[0] == results[1] == {1.0 - worst}


class PolledOnly:
    """A transport's request that completes no other way than by being tested, and only at the third time."""

    def __init__(self, request: Any, log: Counter[str]) -> None:
        self._request, self._log, self._count = request, log, 0

    def test(self) -> bool:
        self._count += 1
        done = self._count >= 3 and self._request.test()
        self._log["done" if done else "pending"] += 1
        return bool(done)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def test_defect_03_polling_alone_completes_what_is_outstanding(monkeypatch: pytest.MonkeyPatch) -> None:
    log: Counter[str] = Counter()
    isend, irecv = local.LocalTransport.isend, local.LocalTransport.irecv
    monkeypatch.setattr(local.LocalTransport, "isend", lambda self, *a: PolledOnly(isend(self, *a), log))
    monkeypatch.setattr(local.LocalTransport, "irecv", lambda self, *a: PolledOnly(irecv(self, *a), log))
    monkeypatch.setattr(matching, "EAGER_NBYTES", 0)
    replaced: list[int] = []

    async def main(world: ad.World) -> set[float]:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=2) as policy:
            await until_replaced(world, policy, replaced, 3, float(world.rank))
        return values(model, floating=True)

    assert run(main, 3)[0] == {1.5}
    assert log["done"] > 50 and log["pending"] >= 2 * log["done"]


@dataclass(frozen=True)
class Text:
    body: str


@pytest.mark.slow
def test_defect_04_send_requests_live_until_they_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the runtime references the requests of ``send_nowait``, and the receiver is late."""
    monkeypatch.setattr(matching, "EAGER_NBYTES", 0)
    finished: list[int] = []

    async def main(world: ad.World) -> list[str]:
        # The receiver's lane takes one, the rest waits at the sender.
        channel = world.channel(Text, tag=5, capacity=1 if world.rank else 100)
        if world.rank == 0:
            for number in range(20):
                channel.send_nowait(Text(f"{number} " + "x" * 1000), 1)
            gc.collect()
            assert channel.statistics().sending_count > 0
            finished.append(0)
            return []
        while not finished:
            await world.safe_point()
        gc.collect()
        return [(await channel.receive()).message.body.split()[0] for _ in range(20)]

    assert run(main, 2)[1] == [str(number) for number in range(20)]


@pytest.mark.parametrize("how", ["data", "submodule", "buffer"])
def test_defect_05_donor_gives_its_rebuilt_model(how: str) -> None:
    replaced: list[int] = []

    async def main(world: ad.World) -> set[float]:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1) as policy:
            await policy.step(float(world.rank))
            if world.rank == 1:
                if how == "data":
                    model.embed.bias.data = torch.full_like(model.embed.bias, 9.0)
                elif how == "submodule":
                    model.norm = fill(nn.BatchNorm1d(4), 9.0)
                else:
                    model.norm.running_mean = torch.full((4,), 9.0)
            rebuilt.append(world.rank)
            while len(rebuilt) < 2:
                await world.safe_point()
            await until_replaced(world, policy, replaced, 3, float(world.rank))
        changed = {"data": model.embed.bias, "submodule": model.norm.weight, "buffer": model.norm.running_mean}[how]
        return {float(element) for element in changed.detach()}

    rebuilt: list[int] = []
    assert run(main, 2) == [{9.0}, {9.0}]


@pytest.mark.slow
def test_defect_08_chunks_of_an_abandoned_round_reach_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replacer gives up in mid-stream, again and again, with chunks of the old round still on their way."""
    monkeypatch.setattr(parameter_stream.messages, "CHUNK_NBYTES", 64)
    monkeypatch.setattr(matching, "EAGER_NBYTES", 65536)
    story, abandoned, tries = Story(), [], Counter[str]()
    original = parameter_stream.receiver.SnapshotReceiver.run

    async def impatient(
        intake: parameter_stream.receiver.SnapshotReceiver, weights: tuple[float, ...], *, deadline: float
    ) -> None:
        tries["all"] += 1
        if tries["all"] % 3 == 0:
            await original(intake, weights, deadline=deadline)
            return
        exchange = asyncio.ensure_future(original(intake, weights, deadline=deadline))
        await yields(tries["all"] % 7)
        exchange.cancel()  # two of three exchanges have no time: some grants are on their way, and some chunks
        with suppress(asyncio.CancelledError):
            await exchange
        if exchange.cancelled():
            tries["without time"] += 1
            raise TimeoutError("no time")

    monkeypatch.setattr(parameter_stream.receiver.SnapshotReceiver, "run", impatient)

    async def main(world: ad.World) -> int:
        model = Mixed(float(world.rank), width=64)
        count = 0
        async with AsyncSelectiveAveragingPolicy(
            model, sgd(model), average_every=1, averaging_strategy="best_only", on_event=story.listener(world.rank)
        ) as policy:
            while len(story.applications) < 6 or tries["without time"] < 10:
                fill(model, count + 1000.0 * world.rank)  # each round's values are its own
                count += 1
                info = await policy.step(float(world.rank))
                if info.abandoned:
                    abandoned.append(info.abandoned)
        return policy.statistics().replacement_count

    applied_count = run(main, 2)[0]
    assert applied_count >= 6 and len(abandoned) >= 9, (tries, abandoned)  # the last may be reported to no rank
    assert story.verify() == applied_count
    for _, event, _ in story.applications:
        assert len(set(event.state["float32"].tolist())) == 1, "the state must not mix the snapshots of two rounds"


def test_defect_08_donor_aborts_other_rounds_and_keeps_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A late grant must not receive the snapshot of a newer round, nor a withdrawn one."""
    monkeypatch.setattr(parameter_stream.messages, "CHUNK_NBYTES", 64)
    monkeypatch.setattr(matching, "EAGER_NBYTES", 0)
    steps: list[str] = []

    async def main(world: ad.World) -> None:
        state = FlatState(fill(Mixed(width=64), 5.0))
        desk = parameter_stream.server.SnapshotServer(world.services, 77)
        if world.rank == 1:
            freed: list[Any] = []
            snapshot = state.new_buffers()
            offer = desk.offer(parameter_stream.server.Offer(5, snapshot, freed.append))
            while "refused" not in steps:
                assert not offer.streams, "the request of round 4 must not get the snapshot of round 5"
                await world.safe_point()
            while not offer.streams:
                await world.safe_point()
            desk.withdraw(offer)
            assert not freed, "the buffer was returned while its chunks were being sent"
            while not freed:
                await world.safe_point()
            assert freed == [snapshot] and desk.is_idle and not offer.streams
            while "over" not in steps:
                await world.safe_point()
            return

        async def receive(number: int) -> None:
            intake = parameter_stream.receiver.SnapshotReceiver(
                world.services,
                desk.channel,
                state.new_buffers(accumulate=True),
                parameter_stream.receiver.new_ring(),
                donors=(1,),
                best=1,
                round=number,
            )
            await intake.run((1.0,), deadline=world.time() + 60)

        for number in (4, 5, 5):
            with pytest.raises(streams.StreamAborted):
                await receive(number)
            steps.append("refused")
            assert world.services.slots.taken_count == 0
        steps.append("over")

    run(main, 2)


def test_defect_09_message_count_is_independent_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    isend = local.LocalTransport.isend

    def counted(self: Any, buffer: Any, dest: int, tag: int) -> Any:
        if tags.BULK_FIRST <= tag <= tags.BULK_LAST:
            sizes.append(memoryview(buffer).nbytes)
        return isend(self, buffer, dest, tag)

    monkeypatch.setattr(local.LocalTransport, "isend", counted)
    replaced: list[int] = []

    async def main(world: ad.World) -> set[float]:
        model = fill(nn.Sequential(*(nn.Linear(3, 3) for _ in range(100))), float(world.rank))
        async with AsyncSelectiveAveragingPolicy(
            model, sgd(model), average_every=1, threshold=0.5, cooldown=10**9
        ) as policy:
            await until_replaced(world, policy, replaced, 1, float(world.rank))
        return values(model, floating=True)

    assert run(main, 3)[0] == {1.5}
    assert sizes == [100 * 12 * 4] * 2, "each donor must send one chunk, whatever the number of parameters"
    assert sizes[0] < streams.CHUNK_NBYTES


def test_defect_10_iterations_beyond_2_to_the_24_are_exact() -> None:
    first = (1 << 24) + 1  # float32 cannot tell it from its neighbour
    events: list[Any] = []
    replaced: list[int] = []

    async def main(world: ad.World) -> list[int]:
        model = Mixed(float(world.rank))
        optimizer = sgd(model)
        staleness, iteration = [], first
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=1, on_event=events.append) as policy:
            while len(replaced) < 3:
                *_, info = await policy(iteration, model, optimizer, float(world.rank))
                iteration += 1
                if info["averaged_this_iteration"]:
                    replaced.append(world.rank)
                    staleness.append(info["staleness_steps"])
        assert policy.iteration == iteration
        return staleness

    staleness = run(main, 2)[0]
    given = {event.round: event.iteration for event in events if isinstance(event, SnapshotTaken)}
    taken = {event.round: event.iteration for event in events if isinstance(event, AverageApplied)}
    assert min(given.values()) >= first
    assert staleness == [max(0, taken[number] - given[number]) for number in sorted(taken)]


def test_defect_12_buffers_arrive_and_optimizer_state_stays() -> None:
    replaced: list[int] = []

    async def main(world: ad.World) -> tuple[set[float], set[float]]:
        model = Mixed(float(world.rank))
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        fill(model, float(world.rank))
        moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        copies, objects = [moment.clone() for moment in moments], identity(model)
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=1) as policy:
            await until_replaced(world, policy, replaced, 2, float(world.rank))
        assert identity(model) == objects
        kept = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        assert all(one is two for one, two in zip(kept, moments, strict=True))
        assert all(torch.equal(one, two) for one, two in zip(kept, copies, strict=True))
        integers = {float(model.norm.num_batches_tracked), *map(float, model.counts)}
        return {float(element) for element in model.norm.running_var}, integers

    assert run(main, 3) == [({1.5}, {2.0}), ({1.0}, {1.0}), ({2.0}, {2.0})]


def test_defect_12_a_name_that_has_gone_is_an_error_in_words() -> None:
    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1) as policy:
            if world.rank == 1:
                del model.norm
            while True:
                await policy.step(float(world.rank))

    with pytest.raises(ValueError, match=r"'norm\.\w+' is gone; the model must keep"):
        run(main, 2)
