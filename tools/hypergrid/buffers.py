"""Replay buffers on ranks of their own: what training ranks send to theirs and learn from it, and what it writes down.

A buffer holds the states that trajectories ended in, and draws them in proportion to their rewards. A rank that gets
some back walks from them to the start with the backward policy, and learns from these trajectories as from its own:
trajectory balance holds for those of any policy.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Self

import torch
from diary import BufferRecorder
from gfn.containers import Trajectories
from gfn.gflownet import TBGFlowNet
from gfn.gym import HyperGrid
from gfn.samplers import Sampler

import asyncdist as ad
from protocols import ReplayBuffer, serve_replay_buffer
from protocols.replay_buffer.store import Batch

CAPACITY = 10_000
REPLAY_EVERY = 4
"""A rank draws a batch after so many of its own."""


# -- on a training rank -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replayed:
    """Something to learn from; its losses say little about a rank, so they are no part of its metric.

    Attributes:
        trajectories: One to each state drawn.
        log_rewards: Float32, one for each, as they came from the buffer.
    """

    trajectories: Trajectories
    log_rewards: torch.Tensor


class Replay:
    """A training rank's way to its buffer; a context manager."""

    def __init__(self, env: HyperGrid, model: TBGFlowNet, server: int) -> None:
        self._env, self._model = env, model
        self._buffer = ReplayBuffer(server)
        self._added_rewards: list[float] = []
        self._drawn_rewards: list[float] = []
        self._wait_s = 0.0

    async def __aenter__(self) -> Self:
        await self._buffer.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._buffer.__aexit__(kind, error, trace)

    async def exchange(self, trajectories: Trajectories) -> Replayed | None:
        """Add where these trajectories ended; every few times return others to learn from."""
        states, log_rewards = trajectories.terminating_states.tensor, trajectories.log_rewards
        rewards = log_rewards.exp()
        started = time.perf_counter()
        await self._buffer.add({"state": states, "log_reward": log_rewards}, priorities=rewards)
        self._added_rewards.append(rewards.mean().item())
        sample = None
        if len(self._added_rewards) % REPLAY_EVERY == 0:
            sample = await self._buffer.sample(len(states))
        self._wait_s += time.perf_counter() - started
        if sample is None:
            return None
        assert isinstance(sample.batch, Mapping)  # as it was added
        drawn = sample.batch["log_reward"]
        self._drawn_rewards.append(drawn.exp().mean().item())
        return Replayed(walk_back(self._env, self._model, sample.batch["state"]), drawn)

    def summary(self) -> dict[str, Any]:
        """What was got of it, as JSON values: rewards are means over states."""
        return {
            "batches": len(self._drawn_rewards),
            "mean_reward_added": fmean(self._added_rewards) if self._added_rewards else None,
            "mean_reward_drawn": fmean(self._drawn_rewards) if self._drawn_rewards else None,
            "wait_s": self._wait_s,
        }


@torch.no_grad()
def walk_back(env: HyperGrid, model: TBGFlowNet, states: torch.Tensor) -> Trajectories:
    """Draw a trajectory to each of `states` with the backward policy, and turn it round."""
    backward = Sampler(model.pb).sample_trajectories(env, states=env.states_from_tensor(states))
    return backward.reverse_backward_trajectories()


# -- on a buffer rank -------------------------------------------------------------------------------------------------


class Contents:
    """What a buffer holds, followed from what is added to it: the newest `CAPACITY` items.

    Args:
        env: Tells what is a mode.
        record: Is told now and then.
    """

    def __init__(self, env: HyperGrid, record: BufferRecorder) -> None:
        self._env = env
        self._record = record
        self._rewards: deque[float] = deque(maxlen=CAPACITY)
        self._modes: deque[int] = deque(maxlen=CAPACITY)

    def note(self, batch: Batch) -> None:
        """The buffer's scoring hook: called with every batch that is added."""
        assert isinstance(batch, Mapping)
        states = self._env.states_from_tensor(batch["state"])
        indices = self._env.get_states_indices(states)
        self._modes.extend(torch.where(self._env.mode_mask(states), indices, -1).tolist())
        self._rewards.extend(batch["log_reward"].exp().tolist())
        if self._record.is_due():
            self._record.held(**self.summary())

    def summary(self) -> dict[str, Any]:
        """As JSON values."""
        size = len(self._rewards)
        modes = sorted(set(self._modes) - {-1})
        return {"size": size, "mean_reward": fmean(self._rewards) if size else None, "modes": modes}


async def serve(world: ad.World, context: ad.DistributedContext, env: HyperGrid, log_dir: Path | None) -> None:
    """Be a buffer until the last of the training ranks that are assigned to this one has left."""
    clients = context.assigned_training_ranks
    assert clients is not None, "this rank is a buffer"
    record = BufferRecorder(log_dir, world.rank)
    record.start(transport=world.transport_name, clients=clients)
    contents = Contents(env, record)
    statistics = await serve_replay_buffer(
        clients, capacity=CAPACITY, prioritized=True, alpha=1.0, score=contents.note, seed=world.rank
    )
    record.end(clients=clients, capacity=CAPACITY, **{**contents.summary(), **asdict(statistics)})
