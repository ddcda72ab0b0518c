"""Reads and writes the memory of other ranks on this host, in two ways.

- :mod:`asyncdist.host_memory.shared_memory`: memory made to be shared, which each rank maps and uses like its own, at
  0.43 ms for 4 MiB. Means among the ranks of a host and the windows of one-sided averaging use it.
- :mod:`asyncdist.host_memory.cross_memory_attach`: the kernel copies to or from any memory of another process, at 0.8
  to 0.96 ms for 4 MiB. Streams of the user's tensors and donors' snapshots use it.

MPI's windows took 0.48 ms for 4 MiB, but are collective, block, and exist only in MPI.
"""
