"""A training like torchgfn's own distributed script: it blocks, does not use a world, and imports its parts here.

    hypergrid_blocking.py [--lib torch|mpi] [--policy selective|all] [--buffers N] [--iterations N]

It makes the same calls in the same order: roles; a buffer rank that serves; a model with each rank's own seed; a replay
buffer with a remote rank; barriers and a policy in each iteration; metadata; ``shutdown``; the statistics; termination
signals; ``cleanup``. Each rank reports its averages and the buffer's answers.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from gfn.estimators import DiscretePolicyEstimator
from gfn.gflownet import TBGFlowNet
from gfn.gym import HyperGrid
from gfn.preprocessors import KHotPreprocessor
from gfn.utils.common import set_seed
from gfn.utils.modules import MLP
from mpi4py import MPI  # torchgfn's script imports MPI, too, and thereby initialises it before asyncdist does
from support.mpi import report

from asyncdist.integrations.torchgfn import (
    AsyncSelectiveAveragingPolicy,
    AsyncSelectiveAveragingPolicympi4pyFast,
    AverageAllPolicy,
    AverageAllPolicympi4py,
    ContainerUnion,
    DistributedContext,
    ReplayBuffer,
    ReplayBufferManager,
    barrier,
    initialize_distributed_compute,
)

EVERY = 5


class Manager(ReplayBufferManager):
    """Scores a container by the modes that it contains."""

    def __init__(self, env: HyperGrid, rank: int, num_training_ranks: int) -> None:
        super().__init__(env, rank, num_training_ranks, scoring_function=self.scoring_function, capacity=64)
        self.env = env
        self.modes: set[int] = set()

    def scoring_function(self, obj: ContainerUnion) -> dict[str, float]:
        new = self.env.modes_found(obj.terminating_states) - self.modes
        self.modes |= new
        return {"score": float(obj.log_rewards.exp().sum()), "n_new_modes": float(len(new))}

    def _compute_metadata(self) -> dict[str, int]:
        return {"n_modes_found": len(self.modes)}


def built(env: HyperGrid) -> tuple[TBGFlowNet, torch.optim.Optimizer]:
    preprocessor = KHotPreprocessor(env.height, env.ndim)
    model = TBGFlowNet(
        pf=DiscretePolicyEstimator(MLP(preprocessor.output_dim, env.n_actions, 32), env.n_actions, preprocessor),
        pb=DiscretePolicyEstimator(
            MLP(preprocessor.output_dim, env.n_actions - 1, 32), env.n_actions, preprocessor, is_backward=True
        ),
        init_logZ=0.0,
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def averaging(args: argparse.Namespace, context: DistributedContext, model: Any, builder: Any) -> Any:
    if args.policy == "all":
        return (AverageAllPolicy if args.lib == "torch" else AverageAllPolicympi4py)(average_every=EVERY)
    if args.lib == "torch":
        return AsyncSelectiveAveragingPolicy(
            model_builder=builder, average_every=EVERY, momentum=0.01, threshold=math.inf, cooldown=EVERY
        )
    return AsyncSelectiveAveragingPolicympi4pyFast(
        model_builder=builder,
        model=model,
        average_every=EVERY,
        threshold_metric=math.inf,
        momentum=0.01,
        age_range=(5, 15),
        group=context.dc_mpi4py.train_global_group,
    )


def main(args: argparse.Namespace) -> None:
    context = initialize_distributed_compute(
        dist_backend="gloo", num_remote_buffers=args.buffers, num_agent_groups=args.groups
    )
    set_seed(4444 + context.my_rank)
    env = HyperGrid(2, 8, reward_fn_kwargs={"R0": 0.1, "R1": 0.5, "R2": 2.0}, store_all_states=False)
    if context.is_buffer_rank():
        assert context.assigned_training_ranks is not None
        manager = Manager(env, context.my_rank, len(context.assigned_training_ranks))
        manager.run()
        report(context.my_rank, {"exits": manager.exit_counter, "modes": len(manager.modes)})
        return
    model, optimizer = built(env)
    replay_buffer = ReplayBuffer(env, capacity=64, remote_manager_rank=context.assigned_buffer)
    barrier(group=context.train_global_group)
    policy = averaging(args, context, model, lambda: built(env))
    averages = best_score = 0.0
    metadata: dict[str, int] = {}
    for iteration in range(args.iterations):
        trajectories = model.sample_trajectories(env, n=8, save_logprobs=False, save_estimator_outputs=True)
        with torch.no_grad():
            score = replay_buffer.add(model.to_training_samples(trajectories))
            chosen = replay_buffer.sample(n_samples=8)
        optimizer.zero_grad()
        loss = model.loss(env, chosen, recalculate_all_logprobs=True)
        loss.backward()
        optimizer.step()
        barrier(group=context.train_global_group)
        model, optimizer, info = policy(
            iteration=iteration,
            model=model,
            optimizer=optimizer,
            local_metric=score["score"] if score is not None else -loss.item(),
            group=context.train_global_group,
        )
        averages += info["averaged_this_iteration"]
        best_score = max(best_score, score["score"] if score else 0.0)
        if context.my_rank == 0 and context.assigned_buffer is not None and iteration % 10 == 0:
            metadata = ReplayBufferManager.get_metadata(context.assigned_buffer)
    barrier(group=context.train_global_group)
    policy.shutdown()
    if args.lib == "mpi" and args.policy == "selective":
        policy.print_stats()
    report(
        context.my_rank,
        {"averages": averages, "counted": policy.replacement_count, "best_score": best_score, "metadata": metadata},
    )
    if context.assigned_buffer is not None:
        ReplayBufferManager.send_termination_signal(context.assigned_buffer)
    barrier(group=context.train_global_group)
    context.cleanup()
    if not MPI.Is_finalized():  # torchgfn's own cleanup ends MPI; simulated ranks share MPI
        MPI.Finalize()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lib", choices=["torch", "mpi"], default="torch")
    parser.add_argument("--policy", choices=["selective", "all"], default="selective")
    parser.add_argument("--buffers", type=int, default=1)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=60)
    torch.set_num_threads(1)
    main(parser.parse_args())
