"""Measures asyncdist on the ranks of a job, beside what a script would call without it: ``python -m asyncdist.bench``.

::

    asyncdist run -n 2 -m asyncdist.bench latency
    mpirun -n 2 python -m asyncdist.bench bandwidth
    torchrun --nproc-per-node 4 -m asyncdist.bench ringtest

Rank 0 prints a table. Both sides of it are measured in the same processes, in alternation, and times are medians.

- ``latency``: the one-way time of a small message between ranks 0 and 1: ``send`` and ``receive`` of a channel, beside
  blocking ``Send`` and ``Recv`` of mpi4py, or ``send`` and ``recv`` of torch.distributed on gloo.
- ``bandwidth``: the rate of a large tensor between them: ``world.send_stream`` and ``world.receive_stream``, beside one
  blocking message.
- ``ringtest``: the time of a small message from rank to rank, around all of them.
- ``step``: ``policy.step()`` in which nothing happens, beside a bare ``asyncio.sleep(0)``; for one rank or more.
"""
