"""The life of one rank, from its start to its end."""

import asyncdist.tensors  # noqa: F401 which refuses a torch that is too old
