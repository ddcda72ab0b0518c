"""Tests which lines of mpirun's standard error are hidden and which are passed on."""

from __future__ import annotations

import pytest

from asyncdist.launch.supervision.mpirun_output import MpirunOutputFilter

RULE = b"-" * 74 + b"\n"
MARK = b"\x1easyncdist 12ab "
BLAME = (
    RULE
    + b"prterun detected that one or more processes exited with non-zero status,\n"
    + b"thus causing the job to be terminated. The first process to do so was:\n\n"
    + b"   Process name: [prterun-vm-1@1,0]\n   Exit code:    1\n"
    + RULE
)
EXITED = (
    RULE
    + b"prterun has exited due to process rank 0 with PID 0 on node host1 calling\n"
    + b'"abort". This may have caused other processes in the application to be\n'
    + RULE
)
OTHER = RULE + b"MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n" + RULE


def feed(data: bytes, step: int) -> tuple[MpirunOutputFilter, bytes]:
    """Feed the text in pieces of the given number of bytes."""
    output_filter = MpirunOutputFilter(MARK)
    passed = b"".join(output_filter.feed(data[place : place + step]) for place in range(0, len(data), step))
    return output_filter, passed + output_filter.flush()


@pytest.mark.parametrize("step", [1, 7, 75, 10_000])
def test_the_block_that_blames_a_rank_is_kept_back_alone(step: int) -> None:
    output_filter, passed = feed(b"before\n" + BLAME + b"between\n" + OTHER + EXITED + RULE + b"\nlast", step)
    assert passed == b"before\nbetween\n" + OTHER + RULE + b"\nlast"
    assert output_filter.blames == [BLAME, EXITED] and not output_filter.has_lost_host and not output_filter.reports


@pytest.mark.parametrize("step", [1, 5, 10_000])
def test_reports_are_taken_out_also_in_the_midst_of_a_line(step: int) -> None:
    output_filter, passed = feed(
        b"a\n" + MARK + b"1 ended -9\n" + b"half" + MARK + b"0 ended 7\n" + b" a line\n\x1e[0m", step
    )
    assert passed == b"a\nhalf a line\n\x1e[0m"
    assert output_filter.reports == [b"1 ended -9", b"0 ended 7"]


@pytest.mark.parametrize("step", [1, 9, 10_000])
def test_a_rank_that_has_ended_before_it_was_notified_is_no_news(step: int) -> None:
    """Regression: after Ctrl-C, mpirun sometimes printed this line of its PMIx server."""
    said = b"[vm.example:03167] PMIX ERROR: PMIX_ERR_UNREACH in file /a/src/server/pmix_server.c at line 3146\n"
    others = b"[vm:1] PMIX ERROR: PMIX_ERR_TIMEOUT in file b.c at line 1\n[1, 2]\n[info] PMIX\n[vm:1] P"
    _, passed = feed(b"before\n" + said + b"between\n" + said + others, step)
    assert passed == b"before\nbetween\n" + others


def test_a_line_without_its_end_passes_through_at_once() -> None:
    output_filter = MpirunOutputFilter(MARK)
    assert output_filter.feed(b"\r 10%") == b"\r 10%" and not output_filter.has_held_bytes
    assert output_filter.feed(b"\r 20%\n--") == b"\r 20%\n" and output_filter.has_held_bytes
    assert output_filter.flush() == b"--" and output_filter.feed(b"--\n") == b"--\n"


@pytest.mark.parametrize("step", [1, 30, 10_000])
def test_a_lost_host_is_noticed(step: int) -> None:
    said = RULE + b"PRTE has lost communication with a remote daemon.\n" + RULE
    output_filter, passed = feed(said, step)
    assert output_filter.has_lost_host and passed == said
    assert output_filter.explain_lost_host() == "mpirun has lost a host, and ended the job early"
    named, _ = feed(said + b"  Remote daemon: [prterun-login-52@0,2] on node host2\n", step)
    assert named.explain_lost_host().endswith("ended the job early: see that host2 runs and that its network is up")


FATAL = (
    b"[host2][[24876,1],1][btl_tcp_endpoint.c:854:start_connect] [host2:00000] *** An error occurred in Socket closed\n"
    b"[host2:00000] *** reported by process [1630273537,1]\n"
)
REFUSED = b" peer: host1 Unable to connect to the peer 10.213.77.1 on port 1024: No route to host\n"
UNANSWERED = (
    b"  Local host: host2\n  PID:        31\n"
    b"  Message:    connect() to 10.213.77.1:1024 failed\n  Error:      Connection timed out (110)\n"
)
SILENT = (
    b"[host1][[38017,1],0][btl_tcp_frag.c:239:mca_btl_tcp_frag_recv] peer: host1 mca_btl_tcp_frag_recv: readv failed: "
    b"Connection timed out (110)\n"
)
CLOSED = SILENT.replace(b"Connection timed out (110)", b"Connection reset by peer (104)")
BROKEN = b"[host2:00000] *** An error occurred in MPI_Allreduce\n[host2:00000] *** reported by process [1630273537,1]\n"


@pytest.mark.parametrize("step", [1, 30, 10_000])
@pytest.mark.parametrize(
    ("said", "what"),
    [
        (FATAL + REFUSED, "could not connect to host1 (10.213.77.1 on port 1024: No route to host)"),
        (UNANSWERED + FATAL, "could not connect to 10.213.77.1 (Connection timed out)"),
        (FATAL + SILENT, "lost its connection to host1 (Connection timed out)"),
        (FATAL + CLOSED, "lost its connection to another rank"),
        (FATAL, "lost its connection to another rank"),
    ],
    ids=["refused", "unanswered", "silent", "closed", "lost"],
)
def test_a_connection_that_failed_names_rank_and_hosts(said: bytes, what: str, step: int) -> None:
    output_filter, passed = feed(said, step)
    assert passed == said
    assert (output_filter.explain_connection() or "").startswith(f"rank 1 on host2 {what}, so MPI ended the job")


@pytest.mark.parametrize("said", [REFUSED, UNANSWERED, BROKEN + REFUSED, BLAME])
def test_a_connection_that_ended_no_job_gets_no_line(said: bytes) -> None:
    output_filter, _ = feed(said, 10_000)
    assert output_filter.explain_connection() is None
