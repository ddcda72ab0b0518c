"""Reads and writes the memory of other ranks on this host, in two ways.

- :mod:`asyncdist.host_memory.shared_memory`: ranks map memory that was allocated for sharing (0.43 ms for 4 MiB). This
  is used to compute means among the ranks on a host, and for one-sided averaging.
- :mod:`asyncdist.host_memory.cross_memory_attach`: the kernel copies to or from any memory of another process (0.8 to
  0.96 ms for 4 MiB). This is used for streams of users' tensors, and for snapshots in parameter streams.

MPI's windows took 0.48 ms for 4 MiB, but creating them is collective and blocks, and other transports lack them.
"""
