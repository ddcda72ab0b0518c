"""mpi4py with buffers: Isend and Irecv, tested in a loop, as a program without asyncdist calls them."""

from __future__ import annotations

from mpi4py import MPI
from work import LARGE, MEAN, SMALL, check_mean, median_s, write

comm = MPI.COMM_WORLD
peer = 1 - comm.rank


def wait(request: MPI.Request) -> None:
    while not request.Test():
        pass


def pass_on(outgoing: object, incoming: object) -> None:
    arriving = comm.Irecv(incoming, peer)
    if comm.rank:
        wait(arriving)
        wait(comm.Isend(outgoing, peer))
    else:
        wait(comm.Isend(outgoing, peer))
        wait(arriving)


message, answer = bytearray(SMALL.nbytes), bytearray(SMALL.nbytes)
small_s = median_s(SMALL, lambda: pass_on(message, answer))
tensor, back = LARGE.tensor().numpy(), LARGE.tensor().numpy()
large_s = median_s(LARGE, lambda: pass_on(tensor, back))
values = MEAN.tensor(1.0 + comm.rank)


def mean() -> None:
    comm.Allreduce(MPI.IN_PLACE, values.numpy())
    values.div_(comm.size)


mean_s = median_s(MEAN, mean)
check_mean(values)
if comm.rank == 0:
    write(small_s=small_s, large_s=large_s, mean_s=mean_s)
