"""asyncdist: an asyncio message-passing runtime for distributed PyTorch training.

One event loop per rank drives tag-multiplexed protocols over polled nonblocking requests. A training loop is a
coroutine, ``async def train(world)``, started by :func:`run`. It awaits policies from the package ``protocols``.

``__init__.pyi`` lists the public names. Each is imported on first use (PEP 562, SPEC 1), so that ``asyncdist --help``
and ``asyncdist run`` do not import torch, which takes a second or more.
"""

import lazy_loader

from asyncdist import rank_program

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

rank_program.explain_shadowing()
