"""Tests that a rank on another host joins a job of ``asyncdist run --places``, as docs/worlds.md says."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from support import hosts
from support.mpi import ROOT

from asyncdist.trust import job_secret

#: Run on the login node: the job on host1 and, once its address is known, a rank on host2, in another directory.
STORY = """
secret=ASYNCDIST_JOB_SECRET_FILE={folder}/secret
other=ASYNCDIST_JOB_SECRET=not-that-of-the-job
start="exec env PYTHONPATH=$PYTHONPATH ASYNCDIST_TEST_REPORTS=$ASYNCDIST_TEST_REPORTS {python} -m asyncdist run"
options="--transport torch -n 2 --places 3"
ssh host1 "cd {root} && export $secret && $start $options {script}" >{folder}/first 2>&1 & first=$!
until grep -q -- --join {folder}/first; do kill -0 $first || exit 99; sleep 0.1; done
port=$(sed -n 's/.*--join [^ ]*:\\([0-9]*\\) .*/\\1/p' {folder}/first)
ssh host2 "export $other && $start --join host1:$port {script}" >{folder}/stranger 2>&1; echo stranger $?
ssh host2 "cd / && export $secret && $start --join host1:$port {script}" >{folder}/second 2>&1 & second=$!
until [ -e {folder}/2.1 ]; do kill -0 $first && kill -0 $second || break; sleep 0.1; done
touch {folder}/enough
wait $second; echo joined $?
wait $first; code=$?
cat {folder}/first {folder}/second {folder}/stranger >&2
exit $code
"""


@pytest.mark.long
def test_a_rank_of_another_host_joins_by_the_first_hosts_name(tmp_path: Path) -> None:
    script = hosts.script("joins.py", tmp_path)
    names = {"python": sys.executable, "root": ROOT, "script": shlex.join(script), "folder": tmp_path}
    secret = tmp_path / "secret"
    secret.write_text(job_secret.draw())
    secret.chmod(0o600)
    result = hosts.run(2, ["bash", "-c", STORY.format(**names)]).check()
    assert result.stdout == "stranger 2\njoined 0\n"
    assert len([line for line in result.stderr.splitlines() if "secret differs from this command's" in line]) == 1
    assert "rank 2 of 3" in result.stderr
    assert {rank: report["incarnation"] for rank, report in result.reports.items()} == {0: 0, 1: 0, 2: 1}
