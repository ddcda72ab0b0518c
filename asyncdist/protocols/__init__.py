"""Makes the package ``protocols`` of this distribution importable as ``asyncdist.protocols``.

The files are in the folder ``protocols`` next to the folder ``asyncdist``, and are found even if another package named
``protocols`` hides them. asyncdist and pickles use only the names ``asyncdist.protocols...``. If a user's ``from
protocols import ...`` finds this distribution, ``protocols.x`` is the same module as ``asyncdist.protocols.x``. The
``.pyi`` files, which ``setup.py`` writes, tell type checkers the same.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_loader
from types import ModuleType

from asyncdist import rank_program


class _Aliases(MetaPathFinder, Loader):
    """Import hook that resolves ``protocols.x`` to ``asyncdist.protocols.x`` if asyncdist owns ``protocols``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, dot, _ = fullname.partition(".")
        if top == "protocols" and dot and sys.modules.get(top) is sys.modules[__name__]:
            return spec_from_loader(fullname, self)
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(f"asyncdist.{module.__name__}")


def _become(module: ModuleType) -> None:
    """Run the ``__init__.py`` of the folder ``protocols`` as this module."""
    source = rank_program.PROTOCOLS
    module.__path__ = [str(source.parent)]
    overwritten = rank_program.find_overwriting()
    if overwritten is not None:
        raise ImportError(overwritten, name=__name__, path=str(source))
    sys.meta_path.insert(0, _Aliases())
    SourceFileLoader(__name__, str(source)).exec_module(module)


_become(sys.modules[__name__])
