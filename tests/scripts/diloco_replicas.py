"""Four ranks as two replicas of two, under DDP and under ``fully_shard``, with DiLoCo between the replicas.

Each rank reports whether its whole model equals, after each step, the model of an oracle in plain torch. The oracle
trains each replica with the mean of its ranks' gradients. Every ``EVERY`` steps it makes the outer step from
whole tensors. Under selective DiLoCo, the second replica trains on negated targets, so that its difference never
counts. Asynchronous DiLoCo waits for all replicas, and so equals DiLoCo. With the arguments ``killed RANK POLICY``,
that rank is killed, and the other replica continues alone.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from support.mpi import report
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import asyncdist as ad
from asyncdist.launchers import addresses
from protocols import AsyncDiLoCoPolicy, DiLoCoPolicy, SelectiveDiLoCoPolicy

SIZE, EVERY, STEPS, KILLED_AT = 2, 4, 20, 10
OUTER = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5, nesterov=True)
KINDS: dict[str, Any] = {
    "diloco": DiLoCoPolicy,
    "async": functools.partial(AsyncDiLoCoPolicy, quorum=2, late="wait", mirror_every=1),
}
Rows = tuple[torch.Tensor, torch.Tensor]


def new_model() -> nn.Module:
    """Return the same model on all ranks: layers that two ranks cannot divide evenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def rows(rank: int, step: int, second: float = 2.0) -> Rows:
    """Return a batch; the targets of the second replica are multiplied by ``second``."""
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(1000 * rank + step))
    return inputs, inputs.sum(1, keepdim=True) * (second if rank // SIZE else 1.0)


def train_step(model: Any, optimizer: torch.optim.Optimizer, *data: Rows) -> None:
    """Make a step with the mean gradient of some batches."""
    optimizer.zero_grad()
    for inputs, targets in data:
        ((model(inputs) - targets).square().mean() / len(data)).backward()
    optimizer.step()


def whole(model: nn.Module) -> list[torch.Tensor]:
    """Return the whole parameters."""
    return [each.full_tensor() if hasattr(each, "full_tensor") else each.detach() for each in model.parameters()]


def sharded_over(mesh: DeviceMesh) -> nn.Module:
    """Return a new model that is sharded over the ranks of a mesh."""
    sharded = new_model()
    fully_shard(sharded[2], mesh=mesh)  # type: ignore[index]
    fully_shard(sharded, mesh=mesh)
    return sharded


class Oracle:
    """Trains all replicas on this rank, each on the mean of its ranks' gradients, with DiLoCo between them."""

    def __init__(self, count: int, second: float = 2.0) -> None:
        self.second = second
        self.models = [new_model() for _ in range(count)]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.0625) for model in self.models]
        self.anchor = [parameter.detach().clone().requires_grad_() for parameter in self.models[0].parameters()]
        self.outer = OUTER(self.anchor)

    def step(self, step: int, donors: tuple[int, ...]) -> None:
        """Make one step of all replicas; ``donors`` are the replicas whose difference counts."""
        for number, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            ranks = [SIZE * number + place for place in range(SIZE)]
            train_step(model, optimizer, *(rows(rank, step, self.second) for rank in ranks))
        if (step + 1) % EVERY == 0:
            for place, anchor in enumerate(self.anchor):
                given = [anchor.detach() - list(self.models[donor].parameters())[place].detach() for donor in donors]
                anchor.grad = sum(given) / len(given)  # type: ignore[assignment]
            self.outer.step()
            for model in self.models:
                nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(self.anchor).detach(), model.parameters())


def error(model: nn.Module, oracle: Oracle, replica: int) -> float:
    """Return the largest difference from the oracle's model."""
    pairs = zip(whole(model), oracle.models[replica].parameters(), strict=True)
    return max(float((mine - theirs).detach().abs().max()) for mine, theirs in pairs)


def anchor_error(model: nn.Module, oracle: Oracle, averaging: Any) -> float:
    """Return the largest difference between the policy's anchor, put into the model for a while, and the oracle's."""
    own = [each.clone() for each in whole(model)]
    with averaging.anchor_weights():
        model(rows(0, 0)[0])  # under fully_shard this gathers the parameters
        found = max(
            float((mine - theirs.detach()).abs().max())
            for mine, theirs in zip(whole(model), oracle.anchor, strict=True)
        )
    return found if all(map(torch.equal, own, whole(model))) else math.inf


def train(world: ad.World, model: nn.Module, kind: str) -> dict[str, Any]:
    """Train a wrapped model, and compare it with the oracle."""
    optimizer, oracle = torch.optim.SGD(model.parameters(), lr=0.0625), Oracle(world.size // SIZE)
    policy = KINDS[kind](model, optimizer, average_every=EVERY, replica_size=SIZE, outer_optimizer=OUTER)
    errors, anchor_errors, donors = [], [], []
    with ad.blocking.policy(policy) as averaging:
        for step in range(STEPS):
            train_step(model, optimizer, rows(world.rank, step))
            info = averaging.step()
            donors += [info.donors] if info else []
            oracle.step(step, (0, 1))
            anchor_errors.append(anchor_error(model, oracle, averaging))
            errors.append(error(model, oracle, world.rank // SIZE))
    sent_nbytes = policy.statistics().sent_nbytes
    return {"errors": errors, "anchor_errors": anchor_errors, "donors": donors, "sent_nbytes": sent_nbytes}


def select(world: ad.World, model: nn.Module) -> dict[str, Any]:
    """Train a wrapped model with selective DiLoCo; the ranks of a replica evaluate different held-out rows."""
    optimizer, oracle = torch.optim.SGD(model.parameters(), lr=0.0625), Oracle(world.size // SIZE, second=-1.0)
    policy = SelectiveDiLoCoPolicy(model, optimizer, average_every=EVERY, replica_size=SIZE, outer_optimizer=OUTER)
    inputs, targets = rows(0, 1000 + world.rank % SIZE)

    def evaluate() -> float:
        with torch.no_grad():
            return float((model(inputs) - targets).square().mean())

    errors, donors = [], []
    with ad.blocking.policy(policy) as averaging:
        for step in range(STEPS):
            train_step(model, optimizer, rows(world.rank, step, -1.0))
            info = averaging.step(loss=evaluate)
            donors += [info.donors] if info else []
            oracle.step(step, tuple(donor // SIZE for donor in info.donors))
            errors.append(error(model, oracle, world.rank // SIZE))
    return {"errors": errors, "donors": donors}


def survive(world: ad.World, model: nn.Module, killed: int, kind: str) -> dict[str, Any]:
    """Train under DDP, lose a rank, and return this rank's observations."""
    optimizer, oracle = torch.optim.SGD(model.parameters(), lr=0.0625), Oracle(world.size // SIZE)
    policy = KINDS[kind](model, optimizer, average_every=EVERY, replica_size=SIZE, outer_optimizer=OUTER)
    errors, donors = [], []
    with ad.blocking.policy(policy) as averaging:
        for step in range(STEPS):
            if world.rank == killed and step == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            train_step(model, optimizer, rows(world.rank, step))
            info = averaging.step()
            donors += [info.donors] if info else []
            oracle.step(step, (0, 1) if step < KILLED_AT else (1 - killed // SIZE,))
            errors.append(error(model, oracle, world.rank // SIZE))
    return {"errors": errors, "donors": donors}


with ad.blocking.open_world() as world:
    torch.set_num_threads(1)
    port = int(ad.blocking.all_gather(torch.tensor(addresses.find_free_port(), device="cpu"))[0])
    if "MASTER_PORT" not in os.environ:  # the ranks were not started by a launcher of torch
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=world.rank, world_size=world.size)
    replica = world.rank // SIZE
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    wrapped = DistributedDataParallel(new_model(), process_group=groups[replica])
    if "killed" in sys.argv:
        report(world.rank, {"killed": survive(world, wrapped, int(sys.argv[-2]), sys.argv[-1])})
        os._exit(0)  # at their end, torch's groups would wait for the killed rank
    found = {"ddp": train(world, wrapped, "diloco")}
    for kind in ("async ddp", "selective ddp"):
        copy = DistributedDataParallel(new_model(), process_group=groups[replica])
        found[kind] = train(world, copy, "async") if kind == "async ddp" else select(world, copy)
    mesh = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])][replica]
    found["fully_shard"] = train(world, sharded_over(mesh), "diloco")
    found["async fully_shard"] = train(world, sharded_over(mesh), "async")
    found["selective fully_shard"] = select(world, sharded_over(mesh))
    found["nbytes"] = sum(each.nbytes for each in new_model().parameters())  # type: ignore[assignment]
    found["frozen_count"] = gc.get_freeze_count()  # type: ignore[assignment]
    report(world.rank, found)
    dist.barrier()
    dist.destroy_process_group()
