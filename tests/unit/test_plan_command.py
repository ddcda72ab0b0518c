"""Tests ``asyncdist plan``: the values that it accepts, the tables, and the recommended line of Python."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.facts import names

from asyncdist import cli
from asyncdist.planning import arguments, outer_rules

JOB = ("--params", "1e9", "--ranks", "64", "--link", "1gbit", "--step", "0.5")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *words])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    return out


def table(out: str, first_line: str) -> dict[tuple[str, str], list[str]]:
    """Return the cells of a printed table, keyed by method and codec; columns are separated by two spaces."""
    lines = out[out.index(first_line) :].split("\n\n")[0].splitlines()[2:]
    cells = [re.split(r" {2,}", line) for line in lines]
    return {(method, wire): rest for method, wire, *rest in cells}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    arguments.add_to(lambda name, **_: parser)
    return parser.parse_args([*JOB, "--every", "128,30,128", "--fragments", "2", "--overlap", "0", "--latency", "0"])


def test_values_are_converted() -> None:
    assert vars(options()) == {
        "params": 10**9,
        "ranks": 64,
        "link": 125e6,
        "step": 0.5,
        "every": (30, 128),
        "fragments": 2,
        "overlap": 0,
        "latency": 0.0,
        "slowest": None,
        "shards": None,
    }


@pytest.mark.parametrize(
    ("convert", "text", "value"),
    [
        *(
            (arguments._parameter_count, text, value)
            for text, value in {
                "1e9": 10**9,
                "7B": 7 * 10**9,
                "7b": 7 * 10**9,
                "350M": 350_000_000,
                "1.5B": 1_500_000_000,
                "12k": 12_000,
                "1T": 10**12,
                "1_000_000": 10**6,
                "1": 1,
            }.items()
        ),
        *(
            (arguments._bandwidth, text, value)
            for text, value in {
                "50mbit": 6.25e6,
                "1gbit": 125e6,
                "100Gbit/s": 12.5e9,
                "1Gbps": 125e6,
                "10gbitps": 1.25e9,
                "800kbit": 1e5,
                "8 bit/s": 1.0,
                "12.5MB/s": 12.5e6,
                "1GBps": 1e9,
                "8 bps": 1.0,
                "1GBit": 125e6,
                "1GiB/s": 2.0**30,
                "1e6B/s": 1e6,
                "3 kB/s": 3e3,
            }.items()
        ),
        *(
            (convert, text, value)
            for convert in (arguments._step_seconds, arguments._latency_seconds)
            for text, value in {"300ms": 0.3, "300 ms": 0.3, "0.3": 0.3, "0.3s": 0.3, "1e3ms": 1.0, ".5 s": 0.5}.items()
        ),
    ],
)
def test_quantities_have_their_usual_units(convert: Callable[[str], float], text: str, value: float) -> None:
    assert convert(text) == value


@pytest.mark.parametrize(
    ("option", "value", "facts"),
    [
        *(
            ("--params", value, ("1e9", "7B", "350M"))
            for value in ("x", "0", "0.4", "-1", "1e99", "7BB", "7 G B", "nan")
        ),
        *(
            ("--link", value, ("50mbit", "1gbit", "12.5MB/s"))
            for value in (
                "x",
                "1000",
                "1gb",
                "1Gb/s",
                "1GB",
                "1GBPS",
                "12.5mb/s",
                "0gbit",
                "0.1bit",
                "1e99gbit",
                "-1gbit",
            )
        ),
        *(("--ranks", value, (2,)) for value in ("1", "x", "0")),
        *(
            ("--step", value, ("1e-09", "0.3", "0.3s", "300ms"))
            for value in ("0", "x", "nan", "inf", "-1", "0ms", "s", "ms", "300 m", "3us", "3MS", "nans")
        ),
        *(("--latency", value, ("from 0 to",)) for value in ("x", "nan", "inf", "-1", "-1ms")),
        *(("--every", value, ("30,128",)) for value in ("x", "0", "", "30,", "1.5")),
        *(("--fragments", value, (1,)) for value in ("0", "x")),
        *(("--overlap", value, (0,)) for value in ("-1", "x")),
        *(("--slowest", value, (1,)) for value in ("0.9", "x", "nan", "inf")),
        ("--shards", "x", ("iid", "mixed", "separate")),
        ("--fragments", "501", (500,)),
        ("--overlap", "501", (500,)),
    ],
)
def test_a_wrong_value_is_one_line(
    option: str, value: str, facts: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *JOB, f"{option}={value}")
    assert (code, out) == (2, "")
    assert err.startswith("asyncdist plan: argument ") and err.count("\n") == 1
    assert option in err and (repr(value) in err or f"got {value}" in err)
    for fact in facts:
        assert str(fact) in err


def test_an_impossible_overlap_names_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *JOB, "--every", "30", "--overlap", "30")
    assert (code, err) == (2, "asyncdist plan: argument --overlap: must be < 30 with --every 30, got 30\n")


def test_the_tables_have_each_method_and_codec(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, *JOB)
    utilisations, costs = table(out, "Utilisation"), table(out, "Cost of a round every 128 steps")
    assert utilisations.keys() == costs.keys()
    diloco = {
        (name, wire) for name in ("DiLoCo", "Streaming DiLoCo") for wire in _wires("bfloat16", "int8", "q4", "topk")
    }
    others = {("DDP", wire) for wire in _wires("bfloat16")}
    assert costs.keys() == diloco | others | {("AverageAllPolicy", "float32"), ("selective averaging", "float32")}
    # 1e9 float32 on 64 ranks: 2 * 4e9 * 63 / 64 bytes, 63 s at 1 Gbit/s, and a chunk of 1 / 32 from each rank once more
    assert costs["DiLoCo", "float32"] == ["7.3 GiB", "65 s", "65 s", "49.6 %", "14.9 GiB"]
    assert costs["Streaming DiLoCo", "int8"] == ["1.9 GiB", "17 s", "0.0 s", "100.0 %", "8.9 GiB", "15 steps"]
    assert utilisations["DiLoCo", "float32"] == ["18.8 %", "49.6 %", "79.4 %"]
    assert utilisations["DDP", "float32"] == costs["DDP", "float32"][3:4] == ["0.79 %"]


def _wires(*others: str) -> tuple[str, ...]:
    return ("float32", *others)


def test_one_number_of_steps_needs_no_table_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, *JOB, "--every", "30")
    assert "Utilisation" not in out
    assert table(out, "Cost of a round every 30 steps")["DiLoCo", "int8"][3] == "47.6 %"
    assert ("Streaming DiLoCo", "int8") not in table(
        printed(capsys, *JOB, "--every", "1"), "Cost of a round in each step"
    )


def test_a_selective_round_longer_than_h_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    note = "average_every should not be smaller"
    assert names(printed(capsys, *JOB, "--every", "126"), 127) and note in printed(capsys, *JOB, "--every", "126")
    assert note not in printed(capsys, *JOB, "--every", "127")


def recommended(out: str) -> str:
    """Return the recommended lines of Python, dedented."""
    return "".join(f"{line[4:]}\n" for line in out.splitlines() if line.startswith("    "))


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ((), {"average_every": 128, "fragments": 4, "overlap_steps": 15, "wire": "int8"}),
        (("--every", "500"), {"average_every": 500, "wire": "int8"}),
        (("--fragments", "8"), {"average_every": 128, "fragments": 8, "overlap_steps": 11, "wire": "int8"}),
        (("--overlap", "20"), {"average_every": 30, "fragments": 3, "overlap_steps": 20, "wire": "int8"}),
        (("--link", "20gbit"), {"average_every": 30, "wire": "bfloat16"}),
        (("--link", "50mbit", "--every", "30"), {"average_every": 30, "wire": "q4"}),
    ],
)
def test_the_recommended_policy_is_python(
    words: tuple[str, ...], options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    code = recommended(printed(capsys, *JOB, *words)) + "    pass\n"
    (statement,) = ast.parse(code).body
    assert isinstance(statement, ast.AsyncWith)
    call = statement.items[0].context_expr
    assert isinstance(call, ast.Call)
    assert ast.unparse(call).startswith("DiLoCoPolicy(model, optimizer, ")
    assert {str(each.arg): ast.literal_eval(each.value) for each in call.keywords} == options


@pytest.mark.parametrize(("link", "line_count"), [("10tbit", 1), ("200gbit", 3)])
def test_ddp_is_recommended_on_a_fast_link(link: str, line_count: int, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "--params", "7B", "--ranks", "8", "--step", "2", "--link", link)
    code = recommended(out)
    assert len(ast.parse(code).body) == line_count
    assert "DistributedDataParallel(model)" in code and ("bf16_compress_hook" in code) is (line_count == 3)
    if line_count == 3:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        assert inspect.isfunction(default_hooks.bf16_compress_hook)


def test_a_link_that_is_too_slow_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--params", "30M", "--ranks", "4", "--link", "50mbit", "--step", "0.0115")
    out = printed(capsys, *words, "--every", "30")
    assert "Neither DDP nor DiLoCo without topk reaches a utilisation of 90 %. The best one has 8.2 %:" in out
    assert "would reach 90 % with a round every 420 steps." in out
    assert "Start from this" in printed(capsys, *words, "--every", "420")
    assert "Start from this" not in printed(capsys, *words, "--every", "384")


def speed_advice(capsys: pytest.CaptureFixture[str], slowest: str, shards: str) -> str:
    """Return the lines about ranks of different speeds, which are printed after all others."""
    out = printed(capsys, *JOB)
    advised = printed(capsys, *JOB, "--slowest", slowest, "--shards", shards)
    heading = "If all ranks were equally fast:\n"
    assert advised.count(heading) == 1 and heading not in out
    advised = advised.replace(heading, "")
    assert advised.startswith(out)
    return advised.removeprefix(out)


def test_slow_ranks_with_alike_data_need_not_wait(capsys: pytest.CaptureFixture[str]) -> None:
    advice = speed_advice(capsys, "4", "iid")
    (*_, statement) = ast.parse(recommended(advice) + "    pass\n").body
    assert isinstance(statement, ast.AsyncWith)
    call = ast.unparse(statement.items[0].context_expr)
    assert call == "AsyncDiLoCoPolicy(model, optimizer, average_every=128)", "the plan must name the default policy"
    assert "Measured at 4 times" in advice and "0.84" in advice and "0.77" in advice


@pytest.mark.parametrize(("slowest", "shards"), [("1", "iid"), ("1", "mixed"), ("4", "separate"), ("16", "separate")])
def test_ranks_wait_if_no_asynchronous_rule_was_better(
    slowest: str, shards: str, capsys: pytest.CaptureFixture[str]
) -> None:
    advice = speed_advice(capsys, slowest, shards)
    assert recommended(advice) == "async with DiLoCoPolicy(model, optimizer, average_every=128) as policy:\n"


@pytest.mark.parametrize("slowest", ["4", "8", "16"])
def test_a_rule_without_momentum_is_preferred(slowest: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With mixed shards at 16 times, Nesterov is better than SGD by 3 % only: docs/staleness.md advises SGD."""
    advice = speed_advice(capsys, slowest, "mixed")
    (*_, outer, statement) = ast.parse(recommended(advice) + "    pass\n").body
    assert ast.unparse(outer) == "outer = partial(torch.optim.SGD, lr=1)"
    assert isinstance(statement, ast.AsyncWith) and "correct" not in ast.unparse(statement)
    for text in ("Measured at 4 times", "0.84"):
        assert (text in advice) is (slowest != "16")
    for text in ("Measured at 16 times", "0.83", "Nesterov", "0.81"):
        assert (text in advice) is (slowest != "4")


def test_between_two_measurements_both_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    advice = speed_advice(capsys, "2", "iid")
    assert "Measured with equal speeds" in advice and "Measured at 4 times" in advice and "\nor\n" in advice
    assert "    async with DiLoCoPolicy(" in advice and "    async with AsyncDiLoCoPolicy(" in advice


def test_outside_the_measured_range_nothing_is_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    for shards in outer_rules.SHARDS:
        assert not recommended(speed_advice(capsys, "17", shards))


def test_the_recommendations_are_the_table_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "staleness.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    for shards in outer_rules.SHARDS.values():
        for ratio, cell in shards.cells.items():
            (row,) = [row for row in rows if row[:2] == [shards.row, str(ratio)]]
            best, best_loss = cell.best or (cell.rule, cell.relative_loss)
            assert row[2:4] == [best.split(", lr=")[0], f"{best_loss:.2f}"]
            own, waiting = (float(text.split(" ")[0]) for text in row[4:6])
            assert own / waiting == pytest.approx(best_loss, abs=0.02)
            assert cell.wins is (own < waiting)
            if cell.rule == outer_rules.DEFAULT:
                (row,) = [row for row in rows if row[:2] == ["the default, not tuned", shards.row]]
                assert row[2 + list(shards.cells).index(ratio)] == f"{cell.relative_loss:.2f}"
            else:
                assert not cell.best or (cell.rule == "SGD" and best_loss < cell.relative_loss <= 1.03 * best_loss)


@pytest.mark.parametrize("words", [("--slowest", "4"), ("--shards", "iid")])
def test_speed_and_shards_are_given_together(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *JOB, *words)
    other = {"--slowest": "--shards", "--shards": "--slowest"}[words[0]]
    assert (code, out, err) == (2, "", f"asyncdist plan: argument {words[0]}: needs {other} as well\n")
