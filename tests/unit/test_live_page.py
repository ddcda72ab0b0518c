"""Tests the page of ``asyncdist top --web``: access to it, its contents, and how often it reads the job."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import itertools
import json
import math
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.facts import names
from support.served_ranks import ServedRanks

from asyncdist import cli, environment
from asyncdist.live.columns import COLUMNS, Readings, Row, columns, together
from asyncdist.live.counters import PolicyCounters, RankCounters
from asyncdist.live.top import JobView
from asyncdist.report.live_page import snapshots
from asyncdist.report.live_page.server import PageServer
from asyncdist.report.live_page.snapshots import LINE_COUNT_MAX, POLICY_COUNT_MAX, History, Snapshots
from asyncdist.report.slow_ranks import slow_ranks_in_words
from asyncdist.story import sockets

JOB = "0000abcd"
PAGE = resources.files("asyncdist.report.live_page").joinpath("page.html").read_text(encoding="utf-8")
DOCS = Path(__file__).parents[2] / "docs"


def counters(rank: int, size: int = 3) -> RankCounters:
    policy = PolicyCounters("<b>mine", 40 + rank, 0.5 * rank, "giving", 3, 2, 1, 7, latest="round 3: average of rank 1")
    return RankCounters(rank, size, 0, JOB, 10.0, (policy,), 5, 6, 1000, 2_000_000, waited_s=1.5, lost=(2,))


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedRanks]:
    """Serve two of the three ranks of a job."""
    monkeypatch.setattr(environment, "shared_directories", lambda: [str(tmp_path)])
    with ServedRanks(JOB, range(2), counters) as served:
        yield served


@pytest.fixture
def server(ranks: ServedRanks) -> Iterator[PageServer]:
    with PageServer(Snapshots(JOB)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: PageServer, path: str, **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Return the status, the headers and the body of an answer."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)) as client:
        client.putrequest("GET", path, skip_host=True, skip_accept_encoding=True)
        for name, value in {"Host": f"127.0.0.1:{server.server_port}", **headers}.items():
            client.putheader(name.replace("_", "-"), value)
        client.endheaders()
        answer = client.getresponse()
        return answer.status, answer.headers, answer.read()


def read(server: PageServer) -> dict[str, Any]:
    status, _, body = get(server, f"/job.json?token={server.token}")
    assert status == 200
    told: dict[str, Any] = json.loads(body)
    return told


# -- who may see it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/job.json", "/other"])
@pytest.mark.parametrize("query", ["", "?token=", "?token=wrong", "?token=%F0%9F%98%80", "?tokens={}", "?token={}x"])
def test_without_the_token_nothing_is_shown(server: PageServer, ranks: ServedRanks, path: str, query: str) -> None:
    status, headers, body = get(server, path + query.format(server.token))
    assert (status, headers["Content-Type"]) == (403, "text/html; charset=utf-8")
    assert b"asyncdist top --web" in body and b"token=" in body, "the answer must name the command and the token"
    assert JOB.encode() not in body and server.token.encode() not in body
    assert not ranks.asked, "a request without the token must not cause a reading"


@pytest.mark.parametrize(
    ("host", "is_served"),
    [
        *[(host, True) for host in ("127.0.0.1:1", "localhost:8000", "LOCALHOST", "127.0.0.1", "[::1]:80")],
        *[(host, False) for host in ("evil.example:80", "127.0.0.1.evil.example", "localhost.", "0.0.0.0", "", "::1")],
    ],
)
def test_only_names_of_this_host_are_served(server: PageServer, host: str, is_served: bool) -> None:
    status, _, body = get(server, f"/?token={server.token}", Host=host)
    assert status == (200 if is_served else 403)
    assert is_served or (b"ssh" in body and server.token.encode() not in body)


def test_another_path_is_not_found(server: PageServer) -> None:
    for path in ("/page.html", "/../job.json", "/job.json/"):
        assert get(server, f"{path}?token={server.token}")[0] == 404


def test_each_page_has_a_nonce_and_headers_that_keep_it_apart(server: PageServer) -> None:
    nonces = set()
    for _ in range(2):
        status, headers, body = get(server, f"/?token={server.token}")
        (nonce,) = set(re.findall(r'nonce="([^"]*)"', body.decode()))
        nonces.add(nonce)
        policy = headers["Content-Security-Policy"]
        assert status == 200 and f"script-src 'nonce-{nonce}';" in policy and "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert headers["Access-Control-Allow-Origin"] is None
        assert (headers["Cache-Control"], headers["Referrer-Policy"]) == ("no-store", "no-referrer")
        assert (headers["X-Content-Type-Options"], headers["Server"]) == ("nosniff", "asyncdist")
    assert len(nonces) == 2


@pytest.mark.parametrize("method", ["POST", "PUT", "HEAD", "OPTIONS"])
def test_other_methods_are_refused_with_the_same_headers(server: PageServer, method: str) -> None:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)) as client:
        client.request(method, f"/job.json?token={server.token}")
        answer = client.getresponse()
        assert (answer.status, answer.headers["Cache-Control"]) == (501, "no-store")
        assert "default-src 'none'; script-src 'none'" in answer.headers["Content-Security-Policy"]
        assert JOB.encode() not in answer.read()


def test_page_loads_nothing_from_elsewhere_and_parses_no_html() -> None:
    assert re.findall(r"\b\w+://[^\"'\s]+", PAGE) == ["http://www.w3.org/2000/svg"]
    assert re.findall(r"<(?:script|style)(?! nonce=\"{nonce}\">)", PAGE) == []
    assert re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b| on\w+=| style=", PAGE) is None


# -- what it shows ----------------------------------------------------------------------------------------------------


def test_a_reading_has_the_words_and_cells_of_the_table(server: PageServer) -> None:
    told = read(server)
    rows = [Row(rank, counters(rank)) for rank in range(2)]
    assert (told["job"], told["is_running"], told["size"], told["lost"]) == (JOB, True, 3, [2])
    assert told["summary"] == together(rows)
    assert told["columns"] == [{"name": each.name, "meaning": each.meaning} for each in columns(rows)]
    assert [line["rank"] for line in told["lines"]] == [0, 1]
    for row, line in zip(rows, told["lines"], strict=True):
        assert row.now is not None
        shown = dict(zip([each["name"] for each in told["columns"]], line["texts"], strict=True))
        assert shown == {each.name: each.text(row, row.now.policies[0]) for each in columns(rows)}
        values = dict(zip(shown, line["values"], strict=True))
        assert (values["step"], values["in"], values["role"]) == (40 + row.rank, 2_000_000, None)
    (history,) = told["history"]
    assert (history["policy"], history["lines"]) == ("<b>mine", ["rank 0", "rank 1", "rank 2"])
    assert [row[1:] for row in history["quantities"]["metric"]] == [[0.0, 0.5, None]]


def step_times(step_s: Mapping[int, float], seconds: int) -> list[dict[int, float]]:
    """Return the live page's step times, read every second, of ranks whose steps take ``step_s`` out of phase."""
    readings, found = Readings(), []
    for second in range(seconds):
        time_s = 1.003 * second
        for rank, each_s in step_s.items():
            step = int(time_s / each_s + 0.37 * rank)
            readings.add(replace(counters(rank), time_s=time_s, policies=(PolicyCounters("", step, None),)))
        found.append(snapshots._step_s(readings.rows()))
    return found


def test_slow_ranks_are_named_as_in_the_report(server: PageServer, ranks: ServedRanks) -> None:
    assert read(server)["slow"] is None
    found = step_times({0: 0.1, 1: 0.1, 2: 0.25, 3: 1e9}, 20)[-1]
    assert found == pytest.approx({0: 0.1, 1: 0.1, 2: 0.25}, rel=0.05)
    assert names(slow_ranks_in_words(found), "Rank 2 took 2.5 times as long per step as the other ranks (100 ms).")


@pytest.mark.parametrize("step_s", [0.02, 0.3, 0.5, 1.0, 3.0, 10.0])
def test_equally_fast_ranks_are_not_called_slow(step_s: float) -> None:
    """Regression: whole steps were counted in five seconds, so ranks with steps of 3 s were always called slow."""
    found = step_times(dict.fromkeys(range(8), step_s), 120)
    assert [slow_ranks_in_words(each) for each in found] == [None] * 120
    assert len(found[-1]) == 8


def test_ranks_that_wait_are_named_after_their_likely_cause() -> None:
    notes = {0: "waits 5.0 s for rank 2", 1: "", 2: "blocks for 5.0 s", 3: "waits 4.0 s for rank 0", 4: "has ended"}
    told = snapshots._notes([Row(rank, None, None, note) for rank, note in notes.items()])
    assert [note["rank"] for note in told] == [2, 4, 0, 3]
    assert {note["rank"]: note["text"] for note in told} == {rank: note for rank, note in notes.items() if note}


def test_a_rank_that_no_longer_answers_adds_no_rate(ranks: ServedRanks, tmp_path: Path) -> None:
    """Regression: the steps per second of a killed rank stayed in the sum over all ranks."""
    seconds = itertools.count()

    def moving(rank: int) -> RankCounters:
        at_s = 10.0 + next(seconds) // 2
        (policy,) = counters(rank).policies
        return replace(counters(rank), time_s=at_s, policies=(replace(policy, step=int(10 * at_s)),))

    ranks._counters = moving
    view, history = JobView(), History()
    places = sockets.jobs()[JOB]
    for _ in range(2):
        view.ask(places)
    assert together(view.rows).startswith(f"job {JOB}: 2 of 3 ranks, 20.0 steps/s")
    gone = replace(places[1], path=tmp_path / "gone")
    view.ask([places[0], gone])
    history.add(0.0, view.rows)
    assert together(view.rows).startswith(f"job {JOB}: 1 of 3 ranks, ")
    assert (view.rows[1].is_silent, view.rows[1].before, view.rows[1].note) == (True, None, "does not answer")
    assert view.rows[1].now is not None, "the last counts of the lost rank must be shown"
    ((_, first, second, _),) = history.policies()[0]["quantities"]["metric"]
    assert first == 0.0 and math.isnan(second)


def test_rows_of_a_second_policy_repeat_no_counts_of_the_rank(server: PageServer, ranks: ServedRanks) -> None:
    first = counters(0)
    two = replace(first, policies=(*first.policies, replace(first.policies[0], policy="#2", metric=float("nan"))))
    ranks._counters = lambda rank: replace(two, rank=rank)
    told = read(server)
    place = [each["name"] for each in told["columns"]].index
    assert [line["rank"] for line in told["lines"]] == [0, 0, 1, 1]
    assert [line["texts"][place("rank")] for line in told["lines"]] == ["0", "0", "1", "1"]
    assert [line["texts"][place("in")] for line in told["lines"]] == ["2.0M", "", "2.0M", ""]
    assert (told["lines"][1]["texts"][place("metric")], told["lines"][1]["values"][place("metric")]) == ("nan", None)


def test_compressed_and_plain_readings_are_equal(server: PageServer) -> None:
    _, plain, body = get(server, f"/job.json?token={server.token}")
    _, packed, squeezed = get(server, f"/job.json?token={server.token}", Accept_Encoding="gzip, br")
    assert (plain["Content-Encoding"], packed["Content-Encoding"]) == (None, "gzip")
    assert plain["Content-Type"] == packed["Content-Type"] == "application/json"
    assert gzip.decompress(squeezed) == body


def test_the_end_of_the_job_keeps_the_last_answers(
    server: PageServer, ranks: ServedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read(server)
    ranks.close()
    monkeypatch.setattr(snapshots, "PERIOD_S", 0.0)
    monkeypatch.setattr(snapshots, "_GONE_S", 0.0)
    after = read(server)
    assert (before["is_running"], after["is_running"], after["notes"]) == (True, False, [])
    for same in ("answered_at", "lines", "summary", "size", "history"):
        assert after[same] == before[same]
    monkeypatch.setattr(server.snapshots, "_find", lambda: pytest.fail("an ended job must not be looked up"))
    assert read(server) == after


def test_sockets_that_return_are_those_of_a_running_job(
    server: PageServer, ranks: ServedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the job was shown as ended forever if the folder of its sockets was removed for a moment."""
    monkeypatch.setattr(snapshots, "PERIOD_S", 0.0)
    before, find = read(server), server.snapshots._find
    monkeypatch.setattr(server.snapshots, "_find", dict)
    meanwhile = read(server)
    assert meanwhile["is_running"] and meanwhile["lines"] == before["lines"]
    monkeypatch.setattr(server.snapshots, "_find", find)
    assert read(server)["is_running"] and server.snapshots.read_count == 2


def test_few_ranks_have_a_line_each_and_many_have_quantiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "POINT_COUNT_MAX", 20)
    for size in (LINE_COUNT_MAX, 512):
        history = History()
        rows = [Row(rank, counters(rank, size)) for rank in range(size) if rank != 1]
        for second in range(100):
            history.add(float(second), rows)
        (told,) = history.policies()
        points = told["quantities"]["metric"]
        assert 10 <= len(points) <= 21
        assert (points[0][0], points[-1][0]) == (0.0, 99.0)
        if size == 512:
            assert (told["lines"], points[0][1:]) == (["minimum", "median", "maximum"], (0.0, 128.0, 255.5))
        else:
            assert told["lines"][7] == "rank 7" and points[0][8] == 3.5 and points[0][2] != points[0][2]


def test_history_is_bounded_if_a_job_opens_many_policies() -> None:
    history = History()
    history.add(0.0, [Row(0, None)])
    for number in range(3 * POLICY_COUNT_MAX):
        policy = PolicyCounters(f"p{number}", 1, 0.0)
        history.add(float(number), [Row(0, replace(counters(0), policies=(policy,)))])
    assert [each["policy"] for each in history.policies()] == [f"p{number}" for number in range(POLICY_COUNT_MAX)]


def test_the_documentation_explains_columns_in_the_same_words() -> None:
    table = re.findall(r"^\| `([^`]+)` \| (.*) \|$", (DOCS / "live.md").read_text(), re.MULTILINE)
    assert [(each.name, each.meaning) for each in COLUMNS] == table[: len(COLUMNS)]


# -- how often it reads the job ---------------------------------------------------------------------------------------


def test_many_viewers_cause_one_reading_and_none_causes_none(
    server: PageServer, ranks: ServedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "PERIOD_S", 600.0)
    assert not ranks.asked, "without a viewer, the job must not be read"
    told = list[tuple[int, http.client.HTTPMessage, bytes]]()
    path = f"/job.json?token={server.token}"
    viewers = [threading.Thread(target=lambda: told.append(get(server, path))) for _ in range(20)]
    for viewer in viewers:
        viewer.start()
    for viewer in viewers:
        viewer.join()
    assert len({body for _, _, body in told}) == 1 and len(told) == 20
    assert ranks.asked == {0: 1, 1: 1} and server.snapshots.read_count == 1
    assert all(0 <= float(headers["Asyncdist-Next-S"]) <= 600.0 for _, headers, _ in told)


def test_a_viewer_that_waits_as_told_gets_a_new_reading(
    server: PageServer, ranks: ServedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"/job.json?token={server.token}"
    monkeypatch.setattr(snapshots, "PERIOD_S", 0.05)
    for count in range(1, 4):
        headers = get(server, path)[1]
        assert ranks.asked == {0: count, 1: count}
        time.sleep(float(headers["Asyncdist-Next-S"]) + 0.001)


# -- wrong uses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--web", "--port", "0"], "argument --port: must be an integer from 1 to 65535, got '0'"),
        (["--web", "--port", "65536"], "argument --port: must be an integer from 1 to 65535, got '65536'"),
        (["--web", "--port", "http"], "argument --port: must be an integer from 1 to 65535, got 'http'"),
        (["--port", "8000"], "--port is the port of the page; add --web"),
        (["--web"], "no job of this user runs on this host; if it runs on another host, run this command there"),
        (["--web", "job"], "no job 'job' of this user runs on this host; if it runs on another host"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    monkeypatch.setattr(environment, "shared_directories", lambda: [str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main(["top", *words])
    told = capsys.readouterr()
    assert (ended.value.code, told.out, told.err.count("\n")) == (2, "", 1)
    assert told.err.startswith(f"asyncdist top: {expected}")


def test_a_port_in_use_is_refused_in_one_line(server: PageServer, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["top", "--web", "--port", str(server.server_port)])
    told = capsys.readouterr()
    at = f"--port {server.server_port}: cannot listen at 127.0.0.1:{server.server_port} (Address already in use)"
    assert (ended.value.code, told.out) == (2, "")
    assert told.err == f"asyncdist top: {at}; choose another port, or omit --port to use a free one\n"


def test_many_ranks_are_asked_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a thousand ranks on one host took more file descriptors than a process may have."""
    monkeypatch.setattr(environment, "shared_directories", lambda: [str(tmp_path)])
    monkeypatch.setattr(sockets, "_ASKED_COUNT_MAX", 2)
    groups = Mock(wraps=sockets._exchange)
    monkeypatch.setattr(sockets, "_exchange", groups)
    with ServedRanks(JOB, range(5), counters):
        answers = sockets.exchange(sockets.jobs()[JOB], sockets.COUNTERS)
    assert sorted(answers) == [0, 1, 2, 3, 4]
    assert [len(call.args[0]) for call in groups.call_args_list] == [2, 2, 1]
