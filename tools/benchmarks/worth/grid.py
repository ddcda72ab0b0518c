"""A GFlowNet (torchgfn's ``TBGFlowNet``) on a HyperGrid of 8 x 8 states with four modes.

Ranks draw their own trajectories. The held-out loss is the loss of trajectories to states that are drawn in proportion
to the rewards. Unlike the training loss, it is bad for a model that has collapsed onto a few states. The quality is the
exact L1 distance between the distribution of the model's samples and the rewards' distribution: 0 is perfect, 2 is the
worst value.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from worth.learning import Judge, Learner, finite

sys.path.append(str(Path(__file__).resolve().parents[2] / "hypergrid"))  # the demo's model is trained here, too

#: Number of states whose trajectories are held out.
_HELD_OUT_COUNT: Final = 64


class GridLearner:
    """Trains a rank's GFlowNet."""

    def __init__(self, seed: int, rank: int, lr_factor: float) -> None:
        from train import build_model

        torch.manual_seed(seed)
        self._env = _env()
        self.model, self.optimizer = build_model(self._env)
        self.usual_rate = float(self.optimizer.param_groups[-1]["lr"])
        for group in self.optimizer.param_groups:
            group["lr"] *= lr_factor
        torch.manual_seed(1000 * (seed + 1) + rank)
        self._held_out = _HeldOut(self._env, seed)
        self._own_loss = math.nan

    def gradients(self) -> None:
        """Compute the gradients of one batch of sampled trajectories."""
        from train import BATCH_SIZE

        trajectories = self.model.sample_trajectories(self._env, n=BATCH_SIZE, save_estimator_outputs=True)
        loss = self.model.loss(self._env, trajectories, recalculate_all_logprobs=False)
        self.optimizer.zero_grad()
        loss.backward()
        found = loss.item()
        self._own_loss = found if math.isnan(self._own_loss) else 0.9 * self._own_loss + 0.1 * found

    def held_out_loss(self) -> float:
        """Return the loss of the held-out trajectories."""
        return self._held_out.loss(self.model)

    def own_loss(self) -> float:
        """Return the running mean of the training losses."""
        return finite(self._own_loss)


class GridJudge:
    """Rates the weights of a run's models."""

    def __init__(self, seed: int) -> None:
        from train import build_model

        self._env = _env()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model: Any = build_model(self._env)[0]
        self._held_out = _HeldOut(self._env, seed)

    def held_out(self, weights: Tensor) -> float:
        """Return the loss of the held-out trajectories."""
        vector_to_parameters(weights, self._model.parameters())
        return self._held_out.loss(self._model)

    def test(self, weights: Tensor) -> float:
        """Return the exact L1 distance, or 2 if it is not finite."""
        from evaluate import l1_distance

        vector_to_parameters(weights, self._model.parameters())
        with torch.no_grad():
            distance = l1_distance(self._env, self._model)
        return distance if math.isfinite(distance) else 2.0


class _HeldOut:
    """Measures a model's balance of flow on random trajectories to states that are drawn in proportion to rewards."""

    def __init__(self, env: Any, seed: int) -> None:
        from evaluate import all_states

        generator = torch.Generator().manual_seed(100_000 + seed)
        states = all_states(env)
        rewards = env.reward_fn(states).double()
        ends = states[torch.multinomial(rewards, _HELD_OUT_COUNT, replacement=True, generator=generator)]
        self._log_rewards = env.reward_fn(ends).double().log()
        self._paths = [_path(end, generator) for end in ends]
        self._visited = torch.cat([visited for visited, _, _ in self._paths])
        self._taken = torch.cat([taken for _, taken, _ in self._paths])
        self._path_of = torch.repeat_interleave(
            torch.arange(len(self._paths)), torch.tensor([len(visited) for visited, _, _ in self._paths])
        )
        self._log_backward = torch.tensor([back for _, _, back in self._paths], dtype=torch.float64)
        self._env = env

    @torch.no_grad()
    def loss(self, model: Any) -> float:
        """Return the mean squared difference between the two sides of the trajectories' balance."""
        batch = self._env.states_from_tensor(self._visited)
        probabilities = model.pf.to_probability_distribution(batch, model.pf(batch)).probs.double()
        logs = probabilities.gather(1, self._taken[:, None]).squeeze(1).clamp_min(1e-30).log()
        forward = torch.zeros(len(self._paths), dtype=torch.float64).index_add_(0, self._path_of, logs)
        log_z = float(next(iter(model.logz_parameters())))
        return finite(float((log_z + forward - self._log_rewards - self._log_backward).square().mean()))


def _path(end: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, float]:
    """Return the states of a random trajectory to ``end``, its actions, and the log of its backward probability.

    The backward policy is uniform: from a state it undoes a step along one of the axes that are not 0.
    """
    state, visited, taken, log_backward = end.clone(), [end.clone()], [len(end)], 0.0
    for _ in range(int(end.sum())):
        axes = torch.nonzero(state).squeeze(1)
        axis = int(axes[torch.randint(len(axes), (1,), generator=generator)])
        log_backward -= math.log(len(axes))
        state[axis] -= 1
        visited.insert(0, state.clone())
        taken.insert(0, axis)
    return torch.stack(visited), torch.tensor(taken), log_backward


def _env() -> Any:
    from gfn.gym import HyperGrid

    return HyperGrid(ndim=2, height=8, reward_fn_kwargs={"R0": 0.01, "R1": 0.5, "R2": 2.0})


def learner(seed: int, rank: int, shards: str, lr_factor: float) -> Learner:
    """Return a rank's learner."""
    del shards
    return GridLearner(seed, rank, lr_factor)


def judge(seed: int) -> Judge:
    """Return the judge of the seed's models."""
    return GridJudge(seed)
