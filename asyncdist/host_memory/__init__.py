"""Reads and writes the memory of other ranks on this host, in two ways.

- :mod:`asyncdist.host_memory.shared_memory`: memory that is made to be shared, and that each rank maps. It is read and
  written like a rank's own, 4 MiB in 0.43 ms. Means among the ranks of a host and the windows of one-sided averaging
  use it.
- :mod:`asyncdist.host_memory.cross_memory_attach`: the kernel copies to or from any memory of another process, 4 MiB
  in 0.8 to 0.96 ms. Streams use it, whose tensors are the user's, and donors' snapshots.

Windows of MPI were a third way, at 0.48 ms for 4 MiB. They are collective and block, and work on MPI alone.
"""
