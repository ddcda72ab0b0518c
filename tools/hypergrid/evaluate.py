"""Computes exactly how well a model samples the grid, without sampling noise or worker processes.

The grid is small enough to compute each state's probability from the probabilities of its parents. torchgfn's own
`env.validate` estimates it from samples, which limits its precision, and enumerates the states with a process pool,
which a rank of an MPI job must not start.
"""

import torch
from gfn.gflownet import TBGFlowNet
from gfn.gym import HyperGrid


def all_states(env: HyperGrid) -> torch.Tensor:
    """Return all states of the grid, one per row, in the order of `env.get_states_indices`."""
    return torch.cartesian_prod(*[torch.arange(env.height)] * env.ndim)


def mode_count(env: HyperGrid) -> int:
    """Return the number of modes, which are the states with the highest reward."""
    return int(env.mode_mask(env.states_from_tensor(all_states(env))).sum())


@torch.no_grad()
def terminal_probabilities(env: HyperGrid, model: TBGFlowNet) -> torch.Tensor:
    """Return for each state the probability that a trajectory of the model ends there; float64."""
    states = all_states(env)
    batch = env.states_from_tensor(states)
    actions = model.pf.to_probability_distribution(batch, model.pf(batch)).probs.double()
    steps_from_origin = states.sum(-1)
    reached = torch.zeros(len(states), dtype=torch.float64)
    reached[0] = 1.0
    for distance in range(env.ndim * (env.height - 1)):
        here = torch.nonzero(steps_from_origin == distance).squeeze(-1)
        for axis in range(env.ndim):
            inside = here[states[here, axis] < env.height - 1]
            neighbours = inside + env.height ** (env.ndim - 1 - axis)
            reached.index_add_(0, neighbours, reached[inside] * actions[inside, axis])
    exits: torch.Tensor = actions[:, -1]
    return reached * exits


def l1_distance(env: HyperGrid, model: TBGFlowNet) -> float:
    """Return the sum over all states of |probability of ending there - target probability|, from 0 (perfect) to 2."""
    rewards = env.reward_fn(all_states(env)).double()
    return float((terminal_probabilities(env, model) - rewards / rewards.sum()).abs().sum())
