"""Compares asyncdist with plain mpi4py or torch.distributed on the ranks of a job: ``python -m asyncdist.bench``.

::

    asyncdist run -n 2 -m asyncdist.bench latency
    mpirun -n 2 python -m asyncdist.bench bandwidth
    torchrun --nproc-per-node 4 -m asyncdist.bench ringtest

Rank 0 prints a table of medians. Both libraries are measured alternately in the same processes.

- ``latency``: one-way time of a small message between ranks 0 and 1 on a channel, compared with blocking ``Send`` and
  ``Recv`` of mpi4py, or ``send`` and ``recv`` of torch.distributed on gloo.
- ``bandwidth``: rate of a large tensor between ranks 0 and 1: ``world.send_stream`` and ``world.receive_stream``,
  compared with one blocking message.
- ``ringtest``: time of a small message from rank to rank, in a ring of all ranks.
- ``step``: time of an idle ``policy.step()``, compared with ``asyncio.sleep(0)``, on one or more ranks.
"""
