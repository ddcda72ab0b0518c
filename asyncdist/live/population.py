"""Shows what each rank of a population does, in a notebook's cell or in a terminal, while one process hosts it.

Protocols tell of themselves by ``Services.progress_probes``. They are asked where the table is drawn, in another thread
than the ranks': a probe only reads.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from asyncdist.errors import AsyncdistError

if TYPE_CHECKING:
    from rich.table import Table

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Progress:
    """What a policy of one rank has done so far.

    Attributes:
        policy: its name, if it has one.
        step: how many steps it has done.
        metric: the last number that it reported; None before.
        replacement_count: how often it has changed the weights.
        latest: the last of these changes.
    """

    policy: str
    step: int
    metric: float | None
    replacement_count: int
    latest: str


class _Services(Protocol):
    progress_probes: list[Callable[[], Progress]]
    last_progress: Progress | None


class _World(Protocol):
    rank: int

    @property
    def services(self) -> _Services: ...


class PopulationView:
    """A table of the ranks that this process hosts: a line for each policy of each rank.

    Raises:
        AsyncdistError: rich, which draws it, is not installed.
    """

    def __init__(self) -> None:
        try:
            import rich.live  # noqa: F401
        except ImportError:
            raise AsyncdistError("live=True needs rich, which draws the table: pip install rich") from None
        self._worlds: dict[int, _World] = {}

    def watched(self, main: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Coroutine[Any, Any, T]]:
        """Return ``main``, whose world is seen from its beginning on."""

        @functools.wraps(main)
        async def watched_main(world: Any, *args: Any) -> T:
            self._worlds[world.rank] = world
            return await main(world, *args)

        return watched_main

    def rows(self) -> list[tuple[int, Progress]]:
        """Return what each rank's policies say; of a rank that has none open any more, what the last one said."""
        rows = []
        for rank, world in sorted(self._worlds.copy().items()):
            last = world.services.last_progress
            told = [probe() for probe in tuple(world.services.progress_probes)] or filter(None, [last])
            rows += [(rank, progress) for progress in told]
        return rows

    def table(self) -> Table:
        """Return the table, as of now."""
        from rich.table import Table

        rows = self.rows()
        are_named = any(told.policy for _, told in rows)
        table = Table("rank", *["policy"] * are_named, "step", "metric", "replaced", "latest")
        for rank, told in rows:
            metric = "" if told.metric is None else f"{told.metric:.5g}"
            name = [told.policy] * are_named
            table.add_row(str(rank), *name, str(told.step), metric, str(told.replacement_count), told.latest)
        return table

    @contextlib.contextmanager
    def shown(self) -> Iterator[Callable[[], None]]:
        """Show the table until the context ends. Yields what draws it anew; in a terminal it draws itself."""
        import rich
        from rich.live import Live

        if rich.get_console().is_jupyter:
            from IPython.display import display

            handle = display(self.table(), display_id=True)  # type: ignore[no-untyped-call]
            try:
                yield lambda: handle.update(self.table())
            finally:
                handle.update(self.table())
        else:
            with Live(get_renderable=self.table, refresh_per_second=4):
                yield lambda: None
