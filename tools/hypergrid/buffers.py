"""Replay buffers of the demo: the client on a training rank, and the main function of a buffer rank.

A buffer stores the final states of trajectories, and samples them in proportion to their rewards. A training rank that
receives a sample walks from its states back to the start with the backward policy. It learns from these trajectories
as from its own, since trajectory balance holds for trajectories of any policy.
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
"""A training rank draws one batch from the buffer per this many batches of its own."""


# -- on a training rank -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replayed:
    """Trajectories drawn from the buffer. Their losses say little about a rank and do not count in its metric.

    Attributes:
        trajectories: One trajectory to each drawn state.
        log_rewards: Log reward of each drawn state, float32, as the buffer sent it.
    """

    trajectories: Trajectories
    log_rewards: torch.Tensor


class Replay:
    """Connects a training rank to its buffer; a context manager."""

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
        """Add the final states of these trajectories to the buffer; every few calls, return a sample to learn from."""
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
        assert isinstance(sample.batch, Mapping)  # batches were added as mappings
        drawn = sample.batch["log_reward"]
        self._drawn_rewards.append(drawn.exp().mean().item())
        return Replayed(walk_back(self._env, self._model, sample.batch["state"]), drawn)

    def summary(self) -> dict[str, Any]:
        """Return statistics of the samples drawn from the buffer, as JSON values; rewards are means over states."""
        return {
            "batches": len(self._drawn_rewards),
            "mean_reward_added": fmean(self._added_rewards) if self._added_rewards else None,
            "mean_reward_drawn": fmean(self._drawn_rewards) if self._drawn_rewards else None,
            "wait_s": self._wait_s,
        }


@torch.no_grad()
def walk_back(env: HyperGrid, model: TBGFlowNet, states: torch.Tensor) -> Trajectories:
    """Sample a trajectory to each of `states` with the backward policy; return them in forward order."""
    backward = Sampler(model.pb).sample_trajectories(env, states=env.states_from_tensor(states))
    return backward.reverse_backward_trajectories()


# -- on a buffer rank -------------------------------------------------------------------------------------------------


class Contents:
    """Tracks the contents of a buffer, its newest `CAPACITY` items, by observing each batch that is added.

    Args:
        env: The grid, which defines the modes.
        record: Recorder to which the contents are written at intervals.
    """

    def __init__(self, env: HyperGrid, record: BufferRecorder) -> None:
        self._env = env
        self._record = record
        self._rewards: deque[float] = deque(maxlen=CAPACITY)
        self._modes: deque[int] = deque(maxlen=CAPACITY)

    def note(self, batch: Batch) -> None:
        """Record a batch that is added; this is the buffer's scoring hook."""
        assert isinstance(batch, Mapping)
        states = self._env.states_from_tensor(batch["state"])
        indices = self._env.get_states_indices(states)
        self._modes.extend(torch.where(self._env.mode_mask(states), indices, -1).tolist())
        self._rewards.extend(batch["log_reward"].exp().tolist())
        if self._record.is_due():
            self._record.held(**self.summary())

    def summary(self) -> dict[str, Any]:
        """Return statistics of the contents, as JSON values."""
        size = len(self._rewards)
        modes = sorted(set(self._modes) - {-1})
        return {"size": size, "mean_reward": fmean(self._rewards) if size else None, "modes": modes}


async def serve(world: ad.World, context: ad.DistributedContext, env: HyperGrid, log_dir: Path | None) -> None:
    """Serve a buffer until all training ranks that are assigned to it have left."""
    clients = context.assigned_training_ranks
    assert clients is not None, "this rank serves a buffer, and cannot add to one"
    record = BufferRecorder(log_dir, world.rank)
    record.start(transport=world.transport_name, clients=clients)
    contents = Contents(env, record)
    statistics = await serve_replay_buffer(
        clients, capacity=CAPACITY, prioritized=True, alpha=1.0, score=contents.note, seed=world.rank
    )
    record.end(clients=clients, capacity=CAPACITY, **{**contents.summary(), **asdict(statistics)})
