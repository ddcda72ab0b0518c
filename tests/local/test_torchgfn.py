"""Tests the names that torchgfn's scripts import: policies, roles and replay buffers, used without an event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.facts import naming
from torch import nn

import asyncdist as ad

pytest.importorskip("gfn", reason="torchgfn is not installed")
from asyncdist.integrations import torchgfn


def made(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, float(rank))
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


def on_ranks(
    main: Callable[[ad.blocking.World], Any], ranks: int, *, strict: bool = True, faults: Sequence[Any] = ()
) -> list[Any]:
    """Run ``main`` on ranks in virtual time."""
    report = ad.simulate(ad.blocking.hosted(main), ranks=ranks, seed=1, strict=strict, faults=faults)
    report.value()
    return list(report.results)


def until_averaged(policy: Any, world: ad.blocking.World, group: Any) -> tuple[nn.Module, list[bool]]:
    """Call the policy until each rank except the first has been averaged, or the limit of calls is reached."""
    model, optimizer = made(world.rank)
    told = []
    for iteration in range(40):
        same, also, info = policy(
            iteration=iteration, model=model, optimizer=optimizer, local_metric=-float(world.rank), group=group
        )
        assert same is model and also is optimizer
        told.append(info["averaged_this_iteration"])
        torchgfn.barrier(group=group)
    return model, told


@pytest.mark.parametrize("threshold", [math.inf, None, -math.inf, 0.5])
def test_an_infinite_threshold_acts_always_or_never(threshold: float | None) -> None:
    """Regression: ``threshold=inf``, the default of torchgfn's script, was refused."""

    def main(world: ad.blocking.World) -> int:
        policy = torchgfn.AsyncSelectiveAveragingPolicy(
            model_builder=None, average_every=2, replacement_ratio=0.5, threshold=threshold, cooldown=0
        )
        _, told = until_averaged(policy, world, None)
        assert policy.replacement_count == sum(told), "Regression: replacement_count stayed 0"
        policy.shutdown()
        policy.shutdown()
        assert policy.policy is None
        with pytest.raises(ad.ClosedError, match="close"):
            policy(41, *made(0), 0.0)
        return policy.replacement_count

    counts = on_ranks(main, 2)
    assert counts[0] == 0 and (counts[1] > 0) == (threshold != -math.inf)


@pytest.mark.parametrize("kind", ["selective", "fast", "all"])
def test_policy_of_the_training_ranks_with_an_idle_rank(kind: str) -> None:
    """Regression: the first call checked ``group`` only after it had begun a start of all ranks."""

    def main(world: ad.blocking.World) -> Any:
        context = torchgfn.initialize_distributed_compute("gloo", num_remote_buffers=1, num_agent_groups=2)
        if context.is_buffer_rank():
            assert not context.is_training_rank() and context.assigned_training_ranks == [0, 1]
            world.sleep(1.0)
            return None
        group = context.train_global_group
        policy: Any = {
            "selective": lambda: torchgfn.AsyncSelectiveAveragingPolicy(None, 2, threshold=math.inf, cooldown=0),
            "fast": lambda: torchgfn.AsyncSelectiveAveragingPolicympi4pyFast(
                None, made(0)[0], 100, age_range=(2, 4), group=context.dc_mpi4py.train_global_group
            ),
            "all": lambda: torchgfn.AverageAllPolicy(average_every=3),
        }[kind]()
        model, told = until_averaged(policy, world, group)
        with pytest.raises(ValueError, match="group must be the group of the first call"):
            policy(50, *made(0), 0.0, group=world.group)
        policy.shutdown()
        context.cleanup()
        context.cleanup()
        return model.weight[0, 0].item(), sum(told)

    reports = on_ranks(main, 3)
    assert reports[2] is None
    weights, counts = zip(*reports[:2], strict=True)
    if kind == "selective":
        assert weights == (0.0, 0.0) and counts[0] == 0 < counts[1]
    elif kind == "all":
        assert weights == (0.5, 0.5) and counts == (13, 13)
    else:
        assert all(counts) and all(0.0 <= weight <= 1.0 for weight in weights)


def test_a_one_sided_policy_tells_its_statistics_after_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    def main(world: ad.blocking.World) -> Any:
        policy = torchgfn.AsyncSelectiveAveragingPolicympi4pyGeneral(
            None, made(0)[0], 100, poll_interval_s=0.1, threshold_metric=math.inf, age_range=(2, 4)
        )
        with pytest.raises(RuntimeError, match="call the policy once before its statistics"):
            policy.print_stats()
        with pytest.raises(ValueError, match=naming("expose_params", False)):
            policy(0, *made(world.rank), 0.0, expose_params=False)
        until_averaged(policy, world, None)
        policy.shutdown()
        if world.rank == 0:
            policy.print_stats()
            policy.print_time()
        return policy.statistics().num_replacements, policy.replacement_count

    counts = on_ranks(main, 2)
    assert all(replaced == counted > 0 for replaced, counted in counts)
    printed = capsys.readouterr().out
    assert f"num replacements  {counts[0][0]}" in printed and "publish" in printed


def test_roles_and_functions_of_groups() -> None:
    def main(world: ad.blocking.World) -> Any:
        context = torchgfn.initialize_distributed_compute_mpi4py(num_remote_buffers=1, num_agent_groups=2)
        if context.is_buffer_rank():
            return None
        group = context.train_global_group
        assert context.get_train_group(backend="torch") is context.get_train_group(backend="mpi") is group
        torchgfn.barrier(group=group, backend="torch")
        model, _ = made(context.my_rank)
        torchgfn.average_models(model, training_group=context.agent_groups[context.agent_group_id])
        own = model.weight[0, 0].item()
        torchgfn.average_models(model, training_group=group)
        data = torch.full((context.my_rank + 1, 2), float(context.my_rank))
        gathered = torchgfn.gather_distributed_data(data, training_group=group)
        name = torch.full((3,), context.my_rank)
        torchgfn.broadcast(name, src=2, group=group)
        assert name.tolist() == [2] * 3
        context.cleanup()
        return own, model.weight[0, 0].item(), None if gathered is None else gathered.shape

    reports = on_ranks(main, 5)
    assert [report and report[0] for report in reports] == [0.5, 0.5, 2.5, 2.5, None]
    assert [report and report[1] for report in reports] == [1.5] * 4 + [None]
    assert [report and report[2] for report in reports] == [torch.Size([10, 2]), None, None, None, None]


def test_a_rank_that_is_alone_has_the_roles_of_one() -> None:
    context = ad.run_local(
        ad.blocking.hosted(lambda _: torchgfn.initialize_distributed_compute("gloo", 1, 2)), ranks=1
    )[0]
    assert context == torchgfn.DistributedContext(my_rank=0, world_size=1, num_training_ranks=1, agent_group_size=1)
    assert context.is_training_rank() and not context.is_buffer_rank()
    context.cleanup()


def test_other_things_are_no_groups() -> None:
    def main(_: ad.blocking.World) -> None:
        with pytest.raises(TypeError, match=r"group must be an asyncdist group, a torch process group, .*, got 3"):
            torchgfn.AverageAllPolicy(average_every=3)(0, *made(0), group=3)

    on_ranks(main, 1)


def test_the_group_made_for_a_process_group_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each policy with a process group kept a group of asyncdist, and therefore a tag."""

    class ProcessGroup:
        def size(self) -> int:
            return 2

    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda _: [0, 1])

    def main(world: ad.blocking.World) -> list[bool]:
        if world.rank == 2:
            return []
        frees = []
        for group in (ProcessGroup(), world.new_group([0, 1])):
            policy = torchgfn.AverageAllPolicy(average_every=3)
            policy(0, *made(0), group=group)
            assert policy.policy is not None
            used = policy.policy.awaited._group
            policy.shutdown()
            frees.append(used.lease.is_freed)
        return frees

    assert on_ranks(main, 3) == [[True, False], [True, False], []]


# -- replay buffers: torchgfn takes seconds to import -----------------------------------------------------------------


def containers(env: Any, count: int) -> Any:
    """Return ``count`` random terminal states in a StatesContainer."""
    from gfn.containers.states_container import StatesContainer

    states = env.states_from_batch_shape((count,), random=True)
    return StatesContainer(
        env, states, is_terminating=torch.ones(count, dtype=torch.bool), log_rewards=torch.zeros(count)
    )


def grid() -> Any:
    from gfn.gym import HyperGrid

    return HyperGrid(2, 8, reward_fn_kwargs={"R0": 0.1, "R1": 0.5, "R2": 2.0}, store_all_states=False)


@pytest.mark.slow
@pytest.mark.parametrize("diverse", [False, True])
def test_a_buffer_rank_scores_keeps_and_ends(diverse: bool) -> None:
    def main(world: ad.blocking.World) -> Any:
        env = grid()
        if world.rank == 2:
            manager = torchgfn.ReplayBufferManager(
                env,
                2,
                2,
                scoring_function=lambda obj: {"score": float(len(obj))},
                diverse_replay_buffer=diverse,
                capacity=30,
                communication_backend="mpi",
            )
            manager._compute_metadata = lambda: {"held": len(manager.replay_buffer), "large": "x" * 100_000}
            manager.run()
            return manager.exit_counter, manager.is_running, len(manager.replay_buffer)
        buffer = torchgfn.ReplayBuffer(
            env, capacity=10, remote_manager_rank=2, remote_buffer_freq=2, communication_backend="torch", timing=True
        )
        scores = [buffer.add(containers(env, count)) for count in (4, 4, 3000, 3000)]
        assert len(buffer) == 10 and buffer.timing_log().startswith(
            "replay buffer: 2 requests to the buffer rank took "
        )
        metadata = torchgfn.ReplayBufferManager.get_metadata(2, backend="torch")
        if world.rank == 0:
            # the other client leaves without a signal
            torchgfn.ReplayBufferManager.send_termination_signal(2, backend="torch")
        return scores, metadata["held"] > 0, len(metadata["large"])

    reports = on_ranks(main, 3)
    assert reports[:2] == [([None, {"score": 8.0}, None, {"score": 6000.0}], True, 100_000)] * 2
    assert reports[2] == (1, False, 30)


@pytest.mark.slow
def test_a_diverse_buffer_sends_each_container_once() -> None:
    """Regression: torchgfn's diverse buffer, unlike its other buffer, does not send in ``add``, so nothing arrived."""

    def main(world: ad.blocking.World) -> Any:
        env = grid()
        if world.rank == 1:
            served: list[int] = []

            def score(added: Any) -> dict[str, float]:
                served.append(len(added))
                return {"score": float(len(added))}

            torchgfn.ReplayBufferManager(env, 1, 1, scoring_function=score).run()
            return served
        buffer = torchgfn.NormBasedDiversePrioritizedReplayBuffer(
            env, capacity=10, remote_manager_rank=1, remote_buffer_freq=2, timing=True
        )
        scores = [buffer.add(containers(env, count)) for count in (4, 5, 20, 30)]
        torchgfn.ReplayBufferManager.send_termination_signal(1)
        assert len(buffer) == 10 and "2 requests" in buffer.timing_log()
        return scores

    assert on_ranks(main, 2) == [[None, {"score": 9.0}, None, {"score": 50.0}], [9, 50]]


@pytest.mark.slow
@pytest.mark.parametrize("pause_s", [0.0, 3.0])
@pytest.mark.parametrize("nbytes", [1, 100_000])
def test_an_interrupted_request_is_completed(nbytes: int, pause_s: float) -> None:
    """Regression: the next request got the answer of the interrupted one. Large answers blocked both ranks."""
    from gfn.containers.message import MessageType

    from asyncdist.integrations.torchgfn import buffers

    def main(world: ad.blocking.World) -> Any:
        env = grid()
        if world.rank == 1:
            added = list[int]()

            def score(container: Any) -> dict[str, Any]:
                added.append(len(container))
                world.sleep(2.0)
                return {"score": len(added), "text": "x" * nbytes}

            torchgfn.ReplayBufferManager(env, 1, 1, scoring_function=score).run()
            return added

        async def interrupted() -> None:
            payload = buffers._packed(containers(env, nbytes))
            async with asyncio.timeout(1.0):
                await buffers._exchange(world.awaited, 1, MessageType.DATA, payload)

        with pytest.raises(TimeoutError):
            world.call(interrupted)
        world.sleep(pause_s)
        buffer = torchgfn.ReplayBuffer(env, remote_manager_rank=1)
        scores: Any = [buffer.add(containers(env, count)) for count in (2, 3)]
        torchgfn.ReplayBufferManager.send_termination_signal(1)
        return [each["score"] for each in scores]

    assert on_ranks(main, 2) == [[2, 3], [nbytes, 2, 3]]


@pytest.mark.slow
def test_an_interrupted_add_is_not_repeated() -> None:
    """Regression: the next ``add`` sent the container of the interrupted one again."""

    def main(world: ad.blocking.World) -> Any:
        env = grid()
        if world.rank == 1:
            added = list[int]()

            def score(container: Any) -> dict[str, Any]:
                added.append(len(container))
                world.sleep(2.0)
                return {}

            torchgfn.ReplayBufferManager(env, 1, 1, scoring_function=score).run()
            return added
        buffer = torchgfn.ReplayBuffer(env, remote_manager_rank=1)

        async def interrupt_later() -> None:
            task = asyncio.current_task()
            assert task is not None, "main's"
            asyncio.get_running_loop().call_later(1.0, task.cancel)

        world.call(interrupt_later)
        with pytest.raises(asyncio.CancelledError):
            buffer.add(containers(env, 4))
        buffer.add(containers(env, 5))
        torchgfn.ReplayBufferManager.send_termination_signal(1)
        return None

    assert on_ranks(main, 2)[1] == [4, 5]


def test_requests_may_end_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: if a later request ended first, as at the end of a world, the earlier one's end raised KeyError."""
    from gfn.containers.message import MessageType

    from asyncdist.integrations.torchgfn import buffers

    async def request(world: ad.World, _: int, __: Any, payload: bytes, *, after: Any) -> None:
        await world.sleep(len(payload))

    monkeypatch.setattr(buffers, "_request", request)

    async def main(world: ad.World) -> tuple[int, list[Any]]:
        told = list[Any]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        if world.rank == 0:
            requests = [buffers._exchange(world, 1, MessageType.DATA, b"x" * count) for count in (2, 1)]
            await asyncio.gather(*requests)
            await world.sleep(1.0)
        return len(world.services.shared(buffers._pending_requests)), told

    assert ad.simulate(main, ranks=2).results == ((0, []),) * 2


@pytest.mark.slow
def test_a_request_to_a_restarted_buffer_rank_fails() -> None:
    """Regression: if the new process started before the client noticed the loss, the client waited for its end."""
    ends = list[float]()

    def main(world: ad.blocking.World) -> None:
        if world.rank == 0:
            with pytest.raises(ad.RankLostError):
                torchgfn.ReplayBufferManager.get_metadata(1)
            ends.append(world.awaited.time())
            return
        if not world.incarnation:
            manager = torchgfn.ReplayBufferManager(grid(), 1, 1)
            manager._compute_metadata = lambda: world.sleep(2.0)
            manager.run()
        world.sleep(5.0)

    on_ranks(main, 2, strict=False, faults=[ad.simulation.Kill(1, at_s=1.0), ad.simulation.Restart(1, at_s=1.0)])
    assert len(ends) == 1 and ends[0] < 2.0


@pytest.mark.slow
def test_requests_between_two_runs_wait_for_the_second_run() -> None:
    """Regression: the channel was closed between the runs, so the request was dropped and both ranks waited forever.

    A rank that has ended the first run asks again before the other one has ended it.
    """

    def main(world: ad.blocking.World) -> Any:
        answers = list[str]()
        for phase in ("first", "second"):
            if world.rank == 0:
                manager = torchgfn.ReplayBufferManager(grid(), 0, 2)
                manager._compute_metadata = lambda phase=phase: phase
                manager.run()
                world.sleep(1.0)
            else:
                world.sleep(0.5 * (world.rank - 1))
                answers.append(torchgfn.ReplayBufferManager.get_metadata(0))
                torchgfn.ReplayBufferManager.send_termination_signal(0)
        return answers

    assert on_ranks(main, 3) == [[], ["first", "second"], ["first", "second"]]


@pytest.mark.slow
def test_the_answer_to_a_lost_process_is_not_sent() -> None:
    """Regression: the rank's new process got it as the answer to its first request, and all later answers one late."""

    def main(world: ad.blocking.World) -> Any:
        def score(got: Any) -> dict[str, int]:
            world.sleep(3.0)  # the rank is restarted meanwhile
            return {"n": len(got)}

        if world.rank == 0:
            torchgfn.ReplayBufferManager(grid(), 0, 1, scoring_function=score).run()
            return None
        buffer = torchgfn.ReplayBuffer(grid(), remote_manager_rank=0)
        scores = [buffer.add(containers(grid(), count)) for count in (5 if world.incarnation else 4, 6)]
        torchgfn.ReplayBufferManager.send_termination_signal(0)
        return scores

    faults = [ad.simulation.Kill(1, at_s=1.0), ad.simulation.Restart(1, at_s=1.5)]
    assert on_ranks(main, 2, strict=False, faults=faults) == [None, [{"n": 5}, {"n": 6}]]


@pytest.mark.slow
def test_requests_of_a_lost_process_are_not_served_later() -> None:
    """A request that waits for the next run is dropped if its sender is restarted, which could get its answer."""

    def main(world: ad.blocking.World) -> Any:
        if world.rank == 0:
            asked = list[int]()
            for _ in range(2):
                manager = torchgfn.ReplayBufferManager(grid(), 0, 1, scoring_function=lambda got: {"n": len(got)})
                manager.replay_buffer.add = lambda got: asked.append(len(got))
                manager.run()
                world.sleep(3.0)
            return asked
        buffer = torchgfn.ReplayBuffer(grid(), remote_manager_rank=0)
        if not world.incarnation:
            torchgfn.ReplayBufferManager.send_termination_signal(0)
            buffer.add(containers(grid(), 4))
        scores = buffer.add(containers(grid(), 5))
        torchgfn.ReplayBufferManager.send_termination_signal(0)
        return scores

    faults = [ad.simulation.Kill(1, at_s=1.0), ad.simulation.Restart(1, at_s=1.5)]
    assert on_ranks(main, 2, strict=False, faults=faults) == [[5], {"n": 5}]


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 1e-4])
def test_a_restarted_client_waits_for_its_buffer_rank(delay_s: float) -> None:
    """Regression: the new process's first request failed if the rank was not connected to the buffer rank yet."""

    def main(world: ad.blocking.World) -> Any:
        if world.rank == 0:
            manager = torchgfn.ReplayBufferManager(grid(), 0, 1)
            manager._compute_metadata = lambda: "served"
            manager.run()
            return None
        if not world.incarnation:
            torchgfn.ReplayBufferManager.get_metadata(0)
            world.sleep(5.0)
        answer = torchgfn.ReplayBufferManager.get_metadata(0)
        torchgfn.ReplayBufferManager.send_termination_signal(0)
        return answer

    faults = [ad.simulation.Kill(1, at_s=1.0), ad.simulation.Restart(1, at_s=1.0 + delay_s)]
    assert on_ranks(main, 2, strict=False, faults=faults)[1] == "served"


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [True, False])
def test_buffer_ranks_end_without_their_clients(is_killed: bool) -> None:
    """Regression: if a client of each buffer rank never asked, the buffer ranks waited for each other forever."""

    def main(world: ad.blocking.World) -> Any:
        context = torchgfn.initialize_distributed_compute("gloo", num_remote_buffers=2)
        if context.is_buffer_rank():
            torchgfn.ReplayBufferManager(grid(), world.rank, 2).run()
        elif world.rank >= 2:
            world.sleep(1.0)
            torchgfn.ReplayBufferManager.send_termination_signal(context.assigned_buffer)
        elif is_killed:
            world.sleep(5.0)
        return world.rank

    faults = [ad.simulation.Kill(rank, at_s=0.5) for rank in (0, 1)] if is_killed else []
    ended = on_ranks(main, 6, strict=False, faults=faults)
    assert ended[2:] == [2, 3, 4, 5] and ended[:2] == ([None, None] if is_killed else [0, 1])


@pytest.mark.slow
def test_a_buffer_rank_that_fails_or_does_not_serve_is_named() -> None:
    def fails(world: ad.blocking.World) -> Any:
        env = grid()
        if world.rank == 1:
            torchgfn.ReplayBufferManager(env, 1, 1).run()
        return torchgfn.ReplayBufferManager.get_metadata(1)

    with pytest.raises(NotImplementedError, match="_compute_metadata is not implemented"):
        on_ranks(fails, 2)

    def leaves(world: ad.blocking.World) -> None:
        if world.rank == 0:
            with pytest.raises(ad.ClosedError, match="rank 1 does not serve a replay buffer: it has left"):
                torchgfn.ReplayBufferManager.get_metadata(1)

    on_ranks(leaves, 2, strict=False)


@pytest.mark.slow
def test_a_policy_of_all_ranks_beside_a_buffer_rank_is_refused() -> None:
    def main(world: ad.blocking.World) -> None:
        if world.rank == 2:
            torchgfn.ReplayBufferManager(grid(), 2, 2).run()
            return
        policy = torchgfn.AverageAllPolicy(average_every=3)
        told = (
            r"rank 2 serves a replay buffer until ranks 0, 1 have left it, .* group=await asyncdist.new_group\(\[0, 1\]"
        )
        with pytest.raises(ad.DisagreementError, match=told):
            policy(0, *made(0))
        torchgfn.ReplayBufferManager.send_termination_signal(2)

    on_ranks(main, 3)
