"""Tests the counters: where they are sent, which are exported, and how a table shows them."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.facts import names

from asyncdist.launch import live_table
from asyncdist.live import destinations as places, exporting, last_counters
from asyncdist.live.columns import COLUMNS, Readings, Row, amount, policies_of, screen, steps_per_s, together
from asyncdist.live.counters import (
    EXPORTED,
    PolicyCounters,
    RankCounters,
    _with_unique_names,
    counters_of,
    from_bytes,
    per_second,
    samples,
)
from asyncdist.live.destinations import Destination, destinations, missing
from asyncdist.live.exporting import Exporter
from asyncdist.live.top import JobView
from asyncdist.story.facts import to_bytes

POLICY = PolicyCounters("mine", 40, 0.5, "giving", 3, 2, 1, 7, latest="round 3: average of rank 1 (7 steps old)")
COUNTERS = RankCounters(
    1, 4, 0, "0000abcd", 10.0, (POLICY,), 5, 6, 1000, 2000, waited_s=1.5, lost=(2,)
)  # rank 1 of 4, ten seconds after


# -- where they go ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (None, ()),
        (9100, (Destination("prometheus", "127.0.0.1", 9100),)),
        ("0.0.0.0:9100", (Destination("prometheus", "0.0.0.0", 9100),)),
        ("[::1]:9100", (Destination("prometheus", "::1", 9100),)),
        ("tensorboard:a:b", (Destination("tensorboard", "a:b"),)),
        ("wandb, opentelemetry", (Destination("wandb"), Destination("opentelemetry"))),
        ([9100, "wandb:mine"], (Destination("prometheus", "127.0.0.1", 9100), Destination("wandb", "mine"))),
    ],
)
def test_destinations_are_named_by_ports_and_words(named: Any, expected: tuple[Destination, ...]) -> None:
    assert destinations(named) == expected
    assert destinations(",".join(map(str, expected)) or None) == expected, (
        "the result must equal the value that asyncdist run passes to its ranks"
    )


@pytest.mark.parametrize("named", ["0", 65536, "-1", "", ",", "tensorboard", "tensorboard:", ":9100", "grafana", []])
def test_another_destination_is_refused_in_one_line(named: Any) -> None:
    with pytest.raises(ValueError, match=r"^metrics must be a port, HOST:PORT, tensorboard:FOLDER.*, got ") as caught:
        destinations(named)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("named", [True, 1.5, [None]])
def test_what_is_no_name_is_refused(named: Any) -> None:
    with pytest.raises(TypeError, match=r"^metrics "):
        destinations(named)


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing(Destination("prometheus", port=9100)) is None
    monkeypatch.setitem(places.NEEDED, "wandb", "no_such_package.part")  # type: ignore[index]
    assert names(missing(Destination("wandb")), "no_such_package", "asyncdist[wandb]")


# -- what is exported -------------------------------------------------------------------------------------------------


def _values(counters: RankCounters) -> dict[str, float]:
    return {sample.name: sample.value for sample in samples(counters)}


def test_samples_are_the_counters_and_each_is_described() -> None:
    found = {sample.name: (sample.value, dict(sample.labels)) for sample in samples(COUNTERS)}
    mine = {"policy": "mine"}
    assert found == {
        "steps": (40, mine),
        "metric": (0.5, mine),
        "round": (3, mine),
        "role": (1, {**mine, "role": "giving"}),
        "replacements": (2, mine),
        "abandoned_rounds": (1, mine),
        "staleness_steps": (7, mine),
        "sent_messages": (5, {}),
        "received_messages": (6, {}),
        "sent_bytes": (1000, {}),
        "received_bytes": (2000, {}),
        "waited_seconds": (1.5, {}),
        "lost_ranks": (1, {}),
    }
    of_averages = {
        "fragment": 0,
        "staleness_versions": 2,
        "outer_norm": 0.5,
        "cosine": -0.25,
        "contributed_bytes": 1000,
        "contributed_unencoded_bytes": 4000,
        "waited_for_averages_seconds": 1.5,
    }
    values = dict(zip(("fragment", "staleness_versions", "outer_norm", "cosine"), of_averages.values(), strict=False))
    sizes = {"wire_nbytes": 1000, "unencoded_nbytes": 4000, "waited_for_averages_s": 1.5}
    averaging = replace(COUNTERS, policies=(replace(POLICY, **values, **sizes),))  # type: ignore[arg-type]
    assert {name: value for name, value in _values(averaging).items() if name not in found} == of_averages
    assert {*found, *of_averages, "steps_per_second"} == set(EXPORTED)


def test_rate_is_known_if_time_has_passed_without_a_restart() -> None:
    earlier = replace(COUNTERS, time_s=8.0, policies=(replace(POLICY, step=30),))
    assert [sample.value for sample in samples(COUNTERS, earlier) if sample.name == "steps_per_second"] == [5.0]
    assert (per_second(4, 4, 2.0), per_second(4, 2, 0.0), per_second(1, 2, 1.0)) == (0.0, None, None)


def test_a_resumed_policy_has_no_rate_from_its_first_reading() -> None:
    """Regression: a policy that resumed at step 10000 made 10000 steps in a second, and the other ranks seemed slow."""
    readings = {each: Readings() for each in ("rank", "second policy")}
    for time_s in range(12):
        step = 10_000 + time_s if time_s > 1 else 0
        one, other = (replace(POLICY, step=step), replace(POLICY, policy="other", step=time_s + 1))
        readings["rank"].add(replace(COUNTERS, time_s=float(time_s), policies=(one,)))
        readings["second policy"].add(
            replace(COUNTERS, time_s=float(time_s), policies=(other, one) if step else (other,))
        )
        rows = [each.row(1) for each in readings.values()]
        assert "10" not in together(rows).partition("ranks, ")[2].partition(" steps")[0]
        assert all(steps_per_s(row, policy) in (None, 0.0, 1.0) for row in rows for policy in policies_of(row))
        assert all(row.step_s in (None, 1.0) for row in rows), time_s
    assert [row.step_s for row in rows] == [1.0, 1.0]
    began, now = (
        replace(COUNTERS, time_s=at, policies=(replace(POLICY, step=step),)) for at, step in ((0.0, 0), (5.0, 10_005))
    )
    assert "steps_per_second" not in {sample.name for sample in samples(now, began)}
    assert "steps_per_second" not in {sample.name for sample in samples(now, replace(began, policies=()))}


def test_counters_are_read_again_if_a_dictionary_has_grown() -> None:
    attempts = []

    class Growing:
        def __getattr__(self, name: str) -> Any:
            attempts.append(name)
            raise RuntimeError("dictionary changed size during iteration")

    with pytest.raises(RuntimeError):
        counters_of(Growing())  # type: ignore[arg-type]
    assert len(attempts) > 10


def test_policies_of_one_name_are_told_apart() -> None:
    named = [replace(POLICY, policy=name) for name in ("", "mine", "", "mine", "")]
    told = _with_unique_names(named)
    assert [each.policy for each in told] == ["", "mine", "#2", "mine #2", "#3"]
    found = [(sample.name, *sample.labels.items()) for sample in samples(replace(COUNTERS, policies=told))]
    assert len(found) == len(set(found))


# -- the thread that writes them --------------------------------------------------------------------------------------


class Sink:
    """Stores the values that it receives, and raises if the test says so."""

    def __init__(self, fails: bool = False) -> None:
        self.taken: list[RankCounters] = []
        self.is_closed = False
        self.fails = fails
        self.has_taken = threading.Event()

    def write(self, counters: RankCounters) -> None:
        self.taken.append(counters)
        self.has_taken.set()
        if self.fails:
            raise OSError("the disk is full")

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def sinks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Exporter, list[Sink]]]:
    def make(*made: Sink, period_s: float = 100.0) -> tuple[Exporter, list[Sink]]:
        left = list(made)
        monkeypatch.setattr(exporting, "TensorBoardWriter", lambda *_: left.pop(0))
        where = [Destination("tensorboard", "folder")] * len(made)
        return Exporter(where, lambda: COUNTERS, 0, period_s), list(made)

    return make


def test_counters_are_written_now_and_then_and_at_the_end(sinks: Any) -> None:
    exporter, (sink,) = sinks(Sink(), period_s=0.001)
    exporter.begin()
    assert sink.has_taken.wait(20)
    exporter.end()
    assert sink.is_closed
    exporter, (sink,) = sinks(Sink())
    exporter.begin()
    exporter.end()
    assert (sink.taken, sink.is_closed) == ([COUNTERS], True)


def test_a_sink_that_fails_is_told_of_once_and_the_others_go_on(sinks: Any, caplog: pytest.LogCaptureFixture) -> None:
    exporter, (bad, good) = sinks(Sink(fails=True), Sink(), period_s=0.001)
    with caplog.at_level(logging.WARNING):
        exporter.begin()
        for _ in range(3):
            good.has_taken.clear()
            assert good.has_taken.wait(20)
        exporter.end()
    assert len(bad.taken) == 1
    assert caplog.messages == ["rank 1 exports no counters to tensorboard: the disk is full; the run continues"]


def test_a_port_that_is_taken_is_one_message(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    with socket.create_server(("127.0.0.1", 0)) as taken, caplog.at_level(logging.WARNING):
        port = taken.getsockname()[1]
        exporter = Exporter([Destination("prometheus", "127.0.0.1", port - 1)], lambda: COUNTERS, 1)
        exporter.begin()
        exporter.end()
    (said,) = caplog.messages
    assert names(said, "rank 1", "prometheus", f"port {port} of 127.0.0.1 is already in use")


def test_the_port_of_a_rank_is_none_above_the_highest(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Exporter([Destination("prometheus", "127.0.0.1", 65535)], lambda: COUNTERS, 1)
    exporter.begin()
    exporter.end()
    assert "port 65535 plus 1 (this rank's number on its host) must be <= 65535" in caplog.text


# -- the table --------------------------------------------------------------------------------------------------------


def drawn(rows: list[Row], width: int = 200, height: int | None = None) -> list[str]:
    console = pytest.importorskip("rich.console").Console(width=width, height=height)
    with console.capture() as capture:
        console.print(screen(rows, width, height))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_table_says_what_each_rank_does_and_what_all_do() -> None:
    readings = Readings()
    readings.add(replace(COUNTERS, time_s=8.0, policies=(replace(POLICY, step=30),), waited_s=1.0, received_nbytes=0))
    readings.add(COUNTERS)
    together, head, line, silent, note = drawn([*readings.rows(), Row(2, None, None, "does not answer")])
    assert together == "job 0000abcd: 1 of 4 ranks, 5.0 steps/s, 1.0kB/s in, lost: 2"
    names = "rank policy step step/s metric round role replaced stale in out waits lost latest"
    assert head.split() == names.split()
    assert line.split()[:13] == ["1", "mine", "40", "5.0", "0.5", "3", "giving", "2", "7", "2.0k", "1.0k", "25%", "1"]
    assert line.endswith(POLICY.latest)
    assert (silent.strip(), note) == ("2", "rank 2 does not answer")


def test_the_table_of_a_job_that_has_ended_says_how_old_it_is() -> None:
    """Regression: the last table of --live showed fewer steps than were made, without its age."""
    console = pytest.importorskip("rich.console").Console(width=120)
    readings = Readings()
    for rank in (1, 2, 3):
        readings.add(replace(COUNTERS, rank=rank))

    def head(**ages_s: float) -> str:
        before_end_s = {int(name[1:]): age_s for name, age_s in ages_s.items()}
        with console.capture() as capture:
            console.print(screen(readings.rows(), 120, None, before_end_s=before_end_s))
        return str(capture.get().partition(" ranks, ")[0])

    assert head(r1=0.71, r2=0.3, r3=0.3) == "0.7 s before the end: job 0000abcd: 3 of 4"
    assert head(r2=0.3) == "rank 2 as of 0.3 s before the end: job 0000abcd: 3 of 4"
    assert head(r1=0.7, r3=12.0) == "ranks 1, 3 as of 12.0 s before the end: job 0000abcd: 3 of 4"
    assert head() == "job 0000abcd: 3 of 4"


# -- the counters with which ranks end --------------------------------------------------------------------------------


def test_the_last_table_has_the_counters_that_ranks_leave(tmp_path: Path) -> None:
    """Regression: the last table of --live showed how far ranks were a second before they ended."""
    console = pytest.importorskip("rich.console").Console(width=120)
    tmp_path.chmod(0o700)
    view = JobView()
    view.drawn_at_end(console, [replace(COUNTERS, rank=2)])  # as if the rank had answered
    last_counters.leave(str(tmp_path), replace(COUNTERS, policies=(replace(POLICY, step=977),)))
    last_counters.leave(str(tmp_path), replace(COUNTERS, rank=3, job="of another job"))
    (tmp_path / "2.4711").write_bytes(b"\x81")  # a rank was killed while it wrote
    left = last_counters.collect(str(tmp_path), COUNTERS.job)
    assert [(each.rank, each.step) for each in left] == [(1, 977)]
    with console.capture() as capture:
        console.print(view.drawn_at_end(console, left))
    assert re.search(r"^ +1 +mine +977 ", capture.get(), re.MULTILINE), capture.get()


def test_newest_process_of_a_restarted_rank_counts(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    view, console = JobView(), pytest.importorskip("rich.console").Console(width=120)
    view.drawn_at_end(console, [replace(COUNTERS, incarnation=1, policies=(replace(POLICY, step=50),))])
    last_counters.leave(str(tmp_path), COUNTERS)
    with console.capture() as capture:
        console.print(view.drawn_at_end(console, last_counters.collect(str(tmp_path), None)))
    assert re.search(r"^ +1 +mine +50 ", capture.get(), re.MULTILINE), capture.get()


def test_counters_go_into_no_folder_that_others_may_enter(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    last_counters.leave(str(tmp_path), COUNTERS)
    last_counters.leave(str(tmp_path / "of another host"), COUNTERS)
    assert list(tmp_path.iterdir()) == []


def test_the_table_shows_names_without_obeying_them() -> None:
    """Regression: rich took "[red]" in a policy's name for a colour, and a terminal its escape sequences."""
    readings = Readings()
    readings.add(replace(COUNTERS, job="j\x1b[2J", policies=(replace(POLICY, policy="[red]\x1b[1m", latest="[/]"),)))
    together, _, line = drawn(readings.rows())
    assert together.startswith("job j\\x1b[2J: ")
    assert line.split()[1] == "[red]\\x1b[1m" and line.endswith("[/]")


def test_a_policy_may_have_any_name() -> None:
    """Regression: ``asyncdist top`` got no answer if a name had a lone surrogate, as in undecodable arguments."""
    named = replace(COUNTERS, policies=(replace(POLICY, policy="a\udce4", latest="\ud800"),))
    assert [(each.policy, each.latest) for each in from_bytes(to_bytes(named)).policies] == [("a?", "?")]


def test_lines_of_several_policies_fit_into_the_terminal() -> None:
    """Regression: ranks were counted instead of lines, so the notes below the table were cut off."""
    policies = (POLICY, replace(POLICY, policy="other"))
    rows = [Row(rank, replace(COUNTERS, rank=rank, policies=policies), None, "waits") for rank in range(8)]
    lines = drawn(rows[:3], 80, 20)
    assert len(lines) == 2 + 6 + 3
    head, _, *shown = drawn(rows[:6], 120, 16)
    assert "showing the 3 with the fewest steps" in head
    assert len(shown) == 6 + 6 and shown[-1].startswith("rank 5 waits")


@pytest.mark.parametrize("metric", [float("nan"), float("inf"), -float("inf")])
def test_a_metric_that_is_no_finite_number_is_shown(metric: float) -> None:
    told = replace(COUNTERS, policies=(replace(POLICY, metric=metric),))
    readings = Readings()
    readings.add(from_bytes(to_bytes(told)))
    assert str(metric) in drawn(readings.rows())[2].split()


def test_a_rank_that_was_started_again_counts_anew() -> None:
    readings = Readings()
    readings.add(COUNTERS)
    readings.add(replace(COUNTERS, incarnation=1, time_s=1.0))
    assert readings.row(1) == Row(1, replace(COUNTERS, incarnation=1, time_s=1.0))
    assert readings.row(3, "silent") == Row(3, None, None, "silent")


def test_waits_in_progress_are_shown_and_are_at_most_the_time() -> None:
    """Regression: during a wait of 17 s the column showed 0 %, and after it 350 %."""
    column = next(each for each in COLUMNS if each.name == "waits")
    readings, shown = Readings(), []
    for time_s in range(20):
        waited_s, waiting_s = (0.0, max(0.0, time_s - 4.0)) if time_s < 17 else (3 * 13.0, 0.0)  # by three tasks
        readings.add(replace(COUNTERS, time_s=float(time_s), waited_s=waited_s, waiting_s=waiting_s))
        shown.append(column.text(readings.row(1), None))
    assert shown == ["", *["0%"] * 4, "20%", "40%", "60%", "80%", *["100%"] * 11]


def test_rates_are_those_of_the_last_seconds() -> None:
    readings = Readings()
    for time_s in range(20):
        readings.add(replace(COUNTERS, time_s=float(time_s)))
    row = readings.row(1)
    assert row.now is not None and row.before is not None
    assert (row.now.time_s, row.before.time_s) == (19.0, 14.0)


def test_rates_after_a_pause_cover_it_only_once() -> None:
    """Regression: for five seconds after an hour without readings, rates were means over that hour."""
    readings, before_s = Readings(), []
    for time_s in (0.0, 1.0, 3600.0, 3601.0, 3602.0):
        readings.add(replace(COUNTERS, time_s=time_s))
        before = readings.row(1).before
        before_s.append(before and before.time_s)
    assert before_s == [None, 0.0, 1.0, 3600.0, 3600.0]


def test_a_narrow_or_low_terminal_shows_what_matters_most() -> None:
    rows = [
        Row(rank, replace(COUNTERS, rank=rank, policies=(replace(POLICY, step=100 - rank, policy=""),)))
        for rank in range(20)
    ]
    for width in (30, 60, 80, 120):
        _, *lines = drawn(rows, width)
        assert all(len(line) <= width for line in lines), lines
        assert lines[0].split()[:2] == ["rank", "step"]
        assert "…" not in "".join(lines)
    lines = drawn(rows, 120, height=7)
    assert lines[0].endswith("20 of 4 ranks, 0.0 steps/s, 0B/s in, lost: 2; showing the 4 with the fewest steps")
    assert [line.split()[0] for line in lines[2:]] == ["16", "17", "18", "19"]


def test_a_notebook_shows_the_table_and_not_its_name() -> None:
    pytest.importorskip("rich", reason="rich is not installed")
    shown = screen([Row(1, COUNTERS)], 80)._repr_mimebundle_([], [])
    assert "job 0000abcd" in shown["text/plain"] and "mine" in shown["text/html"]


def test_of_many_ranks_that_stand_still_some_are_told_of() -> None:
    lines = drawn([Row(rank, replace(COUNTERS, rank=rank), None, "waits for rank 0") for rank in range(8)], 60, 20)
    assert lines[10:] == [
        *(f"rank {rank} waits for rank 0" for rank in range(5)),
        "and 3 more; asyncdist story shows all",
    ]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0k"), (99_940, "99.9k"), (99_960, "100k"), (999_600, "1.0M"), (3e15, "3000T")],
)
def test_amounts_have_five_characters(nbytes: float, text: str) -> None:
    assert amount(nbytes) == text


# -- what a job prints above the table --------------------------------------------------------------------------------


def copied(parts: list[bytes], to: Any) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as pipe:
        copier = threading.Thread(target=live_table._copy, args=(pipe, Console(file=to, width=200)), daemon=True)
        copier.start()
        with os.fdopen(writer, "wb", buffering=0) as into:
            for part in parts:
                into.write(part)
        copier.join(10.0)
        assert not copier.is_alive(), "the copier must have read to the end"


def test_of_a_bar_the_last_state_is_kept() -> None:
    to = io.StringIO()
    copied([b"a\n", *(b"\r%5d |####" % n for n in range(100)), b"\r\n", b"\nb\r", b"\n", b"end"], to)
    assert [line.strip() for line in to.getvalue().splitlines() if line.strip()] == ["a", "99 |####", "b", "end"]


def test_a_line_without_an_end_is_shown_in_parts() -> None:
    to = io.StringIO()
    copied([b"x" * 65536] * 3, to)
    assert to.getvalue().replace("\n", "") == "x" * 3 * 65536
    assert to.getvalue().count("\n") > 1


def test_lost_or_limited_terminal_blocks_no_rank() -> None:
    to = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    copied([b"caf\xc3\xa9\n" * 12_000], to)
    to.close()
    copied([b"cafe\n" * 20_000], to)


class Child:
    """A process that ends at the third look."""

    pid, stdout, stderr = 1, None, None

    def __init__(self) -> None:
        self.codes = [None, None, 0]

    def poll(self) -> int | None:
        return self.codes.pop(0)


@pytest.mark.parametrize("fault", ["no descriptors", "closed terminal"])
def test_the_table_waits_for_the_job_after_an_error(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: an OSError while the job ran ended ``asyncdist run --live`` with a TypeError, and the job."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(live_table.top, "PERIOD_S", 0.001)
    if fault == "no descriptors":
        monkeypatch.setattr(live_table.sockets, "jobs", fail)
    else:
        monkeypatch.setattr(Console, "print", fail)
    child = Child()
    live_table._show(child, "", is_on_stderr=True)  # type: ignore[arg-type]
    assert not child.codes
