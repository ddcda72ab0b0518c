"""A host that is unplugged says nothing, and is found."""

from __future__ import annotations

from scripts import unplugged
from support import hosts


def test_an_unplugged_host_is_lost_to_the_others_and_the_others_to_it() -> None:
    start = ["asyncdist", "run", "--hosts", "host1:2,host2:1", "--transport", "torch"]
    reports = hosts.run(2, [*start, *hosts.script("unplugged.py", "eth0")]).check().reports
    assert [reports[rank]["lost"] for rank in (0, 1)] == [unplugged.VICTIM] * 2
    assert reports[unplugged.VICTIM]["lost"] in (0, 1)
    assert [reports[rank]["left"] for rank in range(3)] == [2, 2, 1]
    assert all(report["steps"] > 20 for report in reports.values()), "they trained on until it was known"
