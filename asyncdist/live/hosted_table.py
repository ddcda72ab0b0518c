"""Shows a live table of the ranks hosted by one process, in a notebook's cell or in a terminal."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from asyncdist import validation
from asyncdist.errors import AsyncdistError
from asyncdist.live.columns import Readings, Row, screen
from asyncdist.live.counters import counters_of
from asyncdist.messaging.services import Services

if TYPE_CHECKING:
    from rich.table import Table

T = TypeVar("T")


class HostedRanksTable:
    """Draws a table of the ranks in this process with rich. Raises AsyncdistError if rich is not installed."""

    def __init__(self) -> None:
        try:
            import rich.live  # noqa: F401
        except ImportError:
            raise AsyncdistError(validation.missing_library("live=True", "rich", "live")) from None
        self._ranks: dict[int, Services] = {}
        self._readings = Readings()

    def watched(self, main: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Coroutine[Any, Any, T]]:
        """Wrap ``main`` so that the table includes its world."""

        @functools.wraps(main)
        async def watched_main(world: Any, *args: Any) -> T:
            self._ranks[world.rank] = world.services
            world.services.count_waits()
            return await main(world, *args)

        return watched_main

    def rows(self) -> list[Row]:
        """Read the counters of all ranks. If a rank has no open policy, its last policy is included."""
        for _, services in sorted(self._ranks.copy().items()):
            self._readings.add(counters_of(services))
        return self._readings.rows()

    def screen(self) -> Table:
        """Return the current table, sized for the terminal or the cell."""
        import rich

        console = rich.get_console()
        return screen(self.rows(), console.width, None if console.is_jupyter else console.height)

    @contextlib.contextmanager
    def shown(self) -> Iterator[Callable[[], None]]:
        """Show the table until the context ends. Yield a function that redraws the table, for notebooks."""
        import rich
        from rich.live import Live

        if rich.get_console().is_jupyter:
            from IPython.display import display

            handle = display(self.screen(), display_id=True)  # type: ignore[no-untyped-call]
            try:
                yield lambda: handle.update(self.screen())
            finally:
                handle.update(self.screen())
        else:
            with Live(get_renderable=self.screen, refresh_per_second=4):
                yield lambda: None
