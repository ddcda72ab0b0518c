"""asyncdist: an asyncio message-passing runtime for distributed PyTorch training.

One event loop per rank drives tag-multiplexed protocols over polled nonblocking requests. A training loop is a
coroutine, ``async def train(world)``, started by :func:`run`; policies from the package ``protocols`` are awaited
inside it.

The public names are listed in ``__init__.pyi``, once. Each is imported on its first use (PEP 562, SPEC 1): importing
torch takes a second or more, which ``asyncdist run``, the start of a test session and ``--help`` can do without.
"""

import lazy_loader

from asyncdist import rank_program

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

rank_program.explain_shadowing()
