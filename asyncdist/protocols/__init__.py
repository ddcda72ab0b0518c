"""Is the package ``protocols`` of this distribution, found by its folder, whatever else is called ``protocols``.

The files lie in the folder ``protocols`` beside the folder ``asyncdist``. Their modules have one name each,
``asyncdist.protocols...``, which asyncdist itself uses, and which pickles have. Users write ``from protocols import
...``: where that finds this distribution, ``protocols.x`` in ``sys.modules`` is the module ``asyncdist.protocols.x``.
For type checkers the ``.pyi`` files here say the same; ``tools/stubs`` writes them.
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
    """Finds each ``protocols.x`` as the module ``asyncdist.protocols.x``, if ``protocols`` is this package."""

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
    """Run the package's own ``__init__.py`` as this module."""
    source = rank_program.PROTOCOLS
    module.__path__ = [str(source.parent)]
    overwritten = rank_program.find_overwriting()
    if overwritten is not None:
        raise ImportError(overwritten, name=__name__, path=str(source))
    sys.meta_path.insert(0, _Aliases())
    SourceFileLoader(__name__, str(source)).exec_module(module)


_become(sys.modules[__name__])
