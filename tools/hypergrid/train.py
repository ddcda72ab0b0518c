"""Train torchgfn's TBGFlowNet on its HyperGrid, on every rank; now and then the worst rank takes the others' average.

    python tools/hypergrid/train.py --iterations 200       one rank, nothing to average
    asyncdist run -n 4 tools/hypergrid/train.py            four ranks, selective averaging
    asyncdist run -n 5 tools/hypergrid/train.py --buffer-ranks 1      and a fifth that is a replay buffer

All ranks start from the same weights and draw their own trajectories. Each rank judges itself by minus the running mean
of its loss, which is cheap and steady. With `--buffer-ranks` the last ranks do not train. They are replay buffers,
which store the final states of the other ranks' trajectories and return samples. `demo.py` shows the run live.
"""

import argparse
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from buffers import Replay, serve
from diary import Recorder
from evaluate import l1_distance, mode_count
from gfn.containers import Trajectories
from gfn.estimators import DiscretePolicyEstimator
from gfn.gflownet import TBGFlowNet
from gfn.gym import HyperGrid
from gfn.preprocessors import KHotPreprocessor
from gfn.utils.modules import MLP
from policies import CHOICES, POLICIES, SIMPLE
from verify import EventWriter

import asyncdist as ad
from protocols import StepInfo

BATCH_SIZE = 16
LOSSES_IN_METRIC = 20


@dataclass(frozen=True, slots=True)
class Finished:
    """Message: the sender has stopped training. The first notice stops all ranks, so no rank waits for a slow one."""


def build_env() -> HyperGrid:
    """Make a grid of 8 x 8 x 8 x 8 states with 16 modes; R0 is the reward of the desert between them."""
    return HyperGrid(ndim=4, height=8, reward_fn_kwargs={"R0": 0.01, "R1": 0.5, "R2": 2.0})


def build_model(env: HyperGrid) -> tuple[TBGFlowNet, torch.optim.Optimizer]:
    """Make a small network that chooses the next step, and Adam, quicker for log Z than for the rest."""
    preprocessor = KHotPreprocessor(env.height, env.ndim)
    network = MLP(input_dim=preprocessor.output_dim, output_dim=env.n_actions, hidden_dim=128)
    model = TBGFlowNet(
        pf=DiscretePolicyEstimator(network, env.n_actions, preprocessor=preprocessor),
        pb=DiscretePolicyEstimator.uniform(env.n_actions, preprocessor=preprocessor),
    )
    fast, slow = {"params": model.logz_parameters(), "lr": 0.1}, {"params": model.pf_pb_parameters(), "lr": 2e-3}
    return model, torch.optim.Adam([fast, slow])


def build_policy(
    args: argparse.Namespace,
    context: ad.DistributedContext,
    env: HyperGrid,
    model: TBGFlowNet,
    optimizer: torch.optim.Optimizer,
) -> Any:
    """Make the policy that `--policy` names, or a context without one. Buffer ranks take no part in it."""
    if args.policy == "none":
        return nullcontext()
    options: dict[str, Any] = {"group": context.train_global_group}
    if args.policy not in (*SIMPLE, "evolution-strategy"):
        options["average_every"] = args.average_every
    if args.policy in ("selective-diloco", "evolution-strategy"):
        options |= {"metric": lambda: l1_distance(env, model), "metric_mode": "min"}
    match args.policy:
        case "population-training":
            options["hyperparameters"] = {"lr": (0.02, 0.5)}  # of the first group, log Z; the other keeps its ratio
        case "evolution-strategy":
            options |= {"sigma": 0.05, "pairs": 2, "fitness": "rank"}
        case "one-sided":
            options |= {"replacement_mode": "worst_ratio", "replacement_ratio": 0.25}
        case "selective":
            on_event = EventWriter(args.log_dir, context.my_rank, model) if args.verify else None
            options |= {"replacement_ratio": 0.25, "on_event": on_event}
    return POLICIES[args.policy](model, optimizer, **options)


def train_step(
    env: HyperGrid, model: TBGFlowNet, optimizer: torch.optim.Optimizer, *, learns: bool = True
) -> tuple[float, Trajectories]:
    """Train for one step in plain, blocking torch; return the loss and the trajectories it was computed from.

    Args:
        learns: Whether the optimizer makes a step; False if the policy makes it.
    """
    trajectories = model.sample_trajectories(env, n=BATCH_SIZE, save_estimator_outputs=True)
    loss = model.loss(env, trajectories, recalculate_all_logprobs=False)
    if learns:
        learn(loss, optimizer)
    return loss.item(), trajectories


def learn(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Make one optimizer step on the loss."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


async def step(world: ad.World, policy: Any, metric: float) -> StepInfo | None:
    """Do a step of the policy, with a metric unless the policy evaluates the model itself; without one, only yield."""
    if not policy:
        await world.safe_point()
        return None
    info: StepInfo = await (policy.step() if policy.calls_metric else policy.step(metric))
    return info


def slowed(factor: float, started: float) -> None:
    """Sleep until `factor` times the time since `started` has passed, to imitate slow hardware."""
    if factor > 1:
        time.sleep((factor - 1) * (time.perf_counter() - started))


async def main(world: ad.World, args: argparse.Namespace) -> float | None:
    """Run one rank: assign the roles, then train or serve a replay buffer."""
    torch.set_num_threads(1)
    context = await ad.initialize_distributed_compute(args.buffer_ranks)
    if context.is_buffer_rank():
        await serve(world, context, build_env(), args.log_dir)
        return None
    return await train(world, context, args)


async def train(world: ad.World, context: ad.DistributedContext, args: argparse.Namespace) -> float:
    """Train on this rank until some rank has made its iterations; returns the distance from the true distribution."""
    env = build_env()
    torch.manual_seed(args.seed)
    model, optimizer = build_model(env)
    torch.manual_seed(1000 * (args.seed + 1) + world.rank)
    factor = args.slow_factor if world.rank == args.slow_rank else 1.0

    finished = world.channel(Finished, tag=100)
    others = [rank for rank in context.train_global_group.ranks if rank != world.rank]
    record = Recorder(args.log_dir, world.rank)
    iteration = loss_count = finished_count = 0
    mean_loss = 0.0
    modes: set[int] = set()

    server = context.assigned_buffer
    async with (
        nullcontext() if server is None else Replay(env, model, server) as buffer,
        build_policy(args, context, env, model, optimizer) as policy,
    ):
        record.start(
            transport=world.transport_name,
            ranks=context.num_training_ranks,
            mode_count=mode_count(env),
            parameter_count=sum(parameter.numel() for parameter in model.parameters()),
        )
        while iteration < args.iterations and record.seconds() < args.seconds and not finished_count:
            started = time.perf_counter()
            loss, trajectories = train_step(env, model, optimizer, learns=args.policy != "evolution-strategy")
            slowed(factor, started)
            iteration += 1
            modes |= env.modes_found(trajectories.terminating_states)
            loss_count = min(loss_count + 1, LOSSES_IN_METRIC)
            mean_loss += (loss - mean_loss) / loss_count
            if buffer and (replayed := await buffer.exchange(trajectories)):
                learn(model.loss(env, replayed.trajectories, log_rewards=replayed.log_rewards), optimizer)

            started = time.perf_counter()
            try:
                info = await step(world, policy, -mean_loss)
            except ad.ClosedError:  # average-all: a rank has left the policy, so no average of all is possible
                break
            record.step(iteration, -mean_loss, time.perf_counter() - started, info)
            if info:
                loss_count = 0  # new weights are judged by their own losses
            finished_count += finished.receive_nowait() is not None

        for rank in others:
            with suppress(ad.RankLostError):
                await finished.send(Finished(), dest=rank)
    await hear_all(finished, context.train_global_group)

    distance = l1_distance(env, model)
    statistics = policy.statistics() if args.policy == "selective" else None
    record.end(
        iteration=iteration,
        metric=-mean_loss,
        modes=modes,
        l1_distance=distance,
        statistics=statistics,
        replay=buffer.summary() if buffer else None,
    )
    return distance


async def hear_all(finished: ad.Channel[Finished], trainers: ad.Group) -> None:
    """Receive the other ranks' notices of their end, so that no message is left over. Lost ranks send none."""
    async with await ad.surviving_group(trainers):  # which all enter, having said it
        await ad.current_world().progress()
        while finished.receive_nowait() is not None:
            pass


def parse_arguments() -> argparse.Namespace:
    """Read the command line; `demo.py` has checked it already."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=CHOICES, default="selective")
    parser.add_argument("--average-every", type=int, default=50, help="steps between two reports of the metric")
    parser.add_argument(
        "--iterations", type=int, default=2000, help="training steps; the first rank to make them ends the training"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="or that long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow-rank", type=int, default=-1, help="this rank is slow on purpose")
    parser.add_argument(
        "--slow-factor", type=float, default=1.0, help="factor by which the slow rank's training step is longer"
    )
    parser.add_argument(
        "--buffer-ranks", type=int, default=0, help="number of ranks, counted from the last, that are replay buffers"
    )
    parser.add_argument("--log-dir", type=Path, help="write rankN.jsonl there instead of printing")
    parser.add_argument("--verify", action="store_true", help="also write the donors' snapshots of each average there")
    args = parser.parse_args()
    if args.verify and args.log_dir is None:
        parser.error("--verify needs --log-dir")
    return args


if __name__ == "__main__":
    ad.run(main, parse_arguments())
