"""Selective averaging in a loop that Accelerate has prepared.

::

    from asyncdist.integrations.accelerate import SelectiveAveraging      # before the Accelerator is made

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    averaging = SelectiveAveraging(model, optimizer, average_every=100)
    for batch in loader:
        ...
        averaging.step(loss)                          # asyncdist run -n 4 train.py

Importing this module hides the variables by which launchers tell of ranks: each rank's ``Accelerator`` prepares one
process, with mixed precision and gradient accumulation as usual, and nobody waits in its loaders.
"""

from asyncdist.integrations.joining import hide_ranks
from asyncdist.integrations.pytorch import SelectiveAveraging as SelectiveAveraging

hide_ranks()
