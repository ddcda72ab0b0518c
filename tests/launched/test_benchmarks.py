"""Tests that every benchmark runs on real ranks, in a tiny configuration, and writes JSON of the expected form.

Results that do not depend on speed are checked: exact byte counts, limits of memory, and the replaced straggler.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import pytest
import torch
from support import mpi, torchrun, warm

pytestmark = pytest.mark.timeout(300)  # up to seven ranks, on any number of cores

LONG_ON_TORCH = pytest.param("torch", marks=pytest.mark.long)
RUN = Path(__file__).parents[2] / "tools" / "benchmarks" / "bench.py"


@pytest.fixture(scope="module")
def runner() -> Iterator[ModuleType]:
    """The module ``bench``, whose ranks start warm; the demo has modules with the same names."""
    names = {path.stem for path in RUN.parent.glob("*.py")}
    hidden = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(RUN.parent)
        run = importlib.import_module(RUN.stem)

        def start_warm(program: Sequence[str], rank_count: int, transport: str) -> int:
            ended: mpi.Result | torchrun.Result
            if not rank_count:  # the benchmark runs in a single process
                script, *arguments = program
                command = [sys.executable, *warm.command(script, arguments, mpi.base_environment(), {})]
                ended = torchrun.run_jobs([(command, {})], timeout_s=280).check()
            else:
                ended = (mpi if transport == "mpi" else torchrun).run_ranks(rank_count, *program, timeout_s=280).check()
            print(ended.output())
            return 0

        patch.setattr(run, "start", start_warm)
        yield run
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(hidden)


Bench: TypeAlias = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Return ``bench(name, *options)``, which returns the results of a quick run in this process."""

    def bench(name: str, *options: str) -> dict[str, Any]:
        out = tmp_path / "results.json"
        code = runner.main([name, "--quick", "--json", str(out), *options])
        output = capsys.readouterr()
        assert code == 0, output.out + output.err
        return results_of(name, out, output.out)

    return bench


def test_an_unwritable_file_is_reported_before_measurements(
    runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the error appeared after an hour, with a traceback."""
    with pytest.raises(SystemExit):
        runner.main(["all", "--json", str(tmp_path / "none" / "results.json")])
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_the_others_are_written_if_one_fails(
    runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the first failure ended an hour of measurements, and nothing was written."""

    def measure(name: str, benchmark: Any, *, transport: str, quick: bool) -> dict[str, Any] | None:
        return None if name == "idle" else {}

    monkeypatch.setattr(runner, "NAMES", ("idle", "step"))
    monkeypatch.setattr(runner, "_measure", measure)
    monkeypatch.setattr(importlib.import_module("step"), "rows", lambda results: [])
    assert runner.main(["all", "--json", str(tmp_path / "results.json")]) == 1
    assert json.loads((tmp_path / "results.json").read_text())["results"] == {"step": {}}
    assert "failed, and not in the report: idle" in capsys.readouterr().out


def results_of(name: str, out: Path, output: str) -> dict[str, Any]:
    assert f"{name}: medians" in output
    written = json.loads(out.read_text())
    assert written.keys() == {"bench", "results"}
    assert written["bench"] == name
    assert all(math.isfinite(number) for number in numbers(written["results"]))
    return dict(written["results"])


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif value not in ("mpi", "torch", None):  # the transport; a time that is not reached
        assert isinstance(value, (int, float)), f"{value!r} is not a number"
        yield value


@pytest.mark.mpi
@pytest.mark.long
def test_latency_on_mpi(bench: Bench) -> None:
    check_latency(bench("latency", "--transport", "mpi"), "mpi")


@pytest.mark.long
def test_latency_on_torch_by_the_command(tmp_path: Path) -> None:
    """The command starts as in a shell, and so with cold ranks."""
    out = tmp_path / "results.json"
    command = [sys.executable, str(RUN), "latency", "--quick", "--json", str(out), "--transport", "torch"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    check_latency(results_of("latency", out, completed.stdout), "torch")


def check_latency(results: dict[str, Any], transport: str) -> None:
    assert results.pop("transport") == transport
    assert results["ours_us"] > 0 and results["raw_us"] > 0
    assert results["ratio"] == pytest.approx(results["ours_us"] / results["raw_us"])
    assert 32 < results["frame_nbytes"] < 100
    assert results["crowded_ratio"] == pytest.approx(results["crowded_us"] / results["crowded_streams_us"])


@pytest.mark.mpi
@pytest.mark.long  # CI runs the benchmark itself
def test_ratios(bench: Bench) -> None:
    results = bench("ratios")
    assert len(results) == 3 and all(ratio > 0 for ratio in results.values())


@pytest.mark.mpi
@pytest.mark.long
def test_startup(bench: Bench) -> None:
    results = bench("startup")
    assert list(results) == ["ours on MPI", "bare MPI", "ours on torch", "torchrun"]
    assert all(figures["s"] > 0 and figures["cpu_s"] > 0 for figures in results.values())


@pytest.mark.mpi
@pytest.mark.long
def test_awaiting(bench: Bench) -> None:
    results = bench("awaiting")
    for loop in ("asyncio", "uvloop"):
        assert results[loop]["ratio"] == pytest.approx(results[loop]["ours_us"] / results[loop]["rival_us"])
        assert results[loop]["ours_cpu_percent"] > 0


@pytest.mark.parametrize("transport", [pytest.param("mpi", marks=pytest.mark.mpi), "torch"])
@pytest.mark.long
def test_bandwidth(bench: Bench, transport: str) -> None:
    results = bench("bandwidth", "--transport", transport)
    assert results.pop("transport") == transport
    assert list(results["sizes"]) == ["1 MiB", "4 MiB"]
    for figures in results["sizes"].values():
        assert figures["ratio"] == pytest.approx(figures["ours_gb_s"] / figures["raw_gb_s"])


@pytest.mark.parametrize("transport", [pytest.param("mpi", marks=pytest.mark.mpi), "torch"])
@pytest.mark.long
def test_beside(bench: Bench, transport: str) -> None:
    results = bench("beside", "--transport", transport)
    assert results.pop("transport") == transport
    assert results["beside"]["count"] == results["alone"]["count"] >= 2
    for figures in (results["beside"], results["alone"]):
        assert 0 < figures["median_ms"] <= figures["p95_ms"] <= figures["max_ms"]


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["step", pytest.param("one-sided", marks=pytest.mark.long)])
def test_step(bench: Bench, name: str) -> None:
    results = bench(name)
    assert list(results) == ["85 k", "1.1 M", "20 M", "yield", "cold 1 ms"]
    for ranks in results.values():
        assert ranks.keys() == {"rank 0", "rank 1"}
    for figures in results.pop("cold 1 ms").values():
        assert all(0 < figures[f"{name}p10_us"] <= figures[f"{name}median_us"] for name in ("", "yield_", "alone_"))
    for ranks in results.values():
        for figures in ranks.values():
            assert 0 < figures["median_us"] <= figures["p99_us"]


@pytest.mark.mpi
@pytest.mark.long
def test_faces(bench: Bench) -> None:
    results = bench("faces")
    assert list(results) == ["coroutine", "blocking", "plain", "torchgfn", "lightning", "transformers"]
    for ranks in results.values():
        assert all(0 < figures["median_us"] <= figures["p95_us"] for figures in ranks.values()) and len(ranks) == 2


def test_gpu(bench: Bench) -> None:
    results = bench("gpu", "--transport", "torch")
    assert bool(results) == torch.cuda.is_available(), "without a GPU, the benchmark must have no results"


@pytest.mark.mpi
@pytest.mark.long
def test_mailbox(bench: Bench) -> None:
    results = bench("mailbox")
    assert all(results[f"{whose}_{unit}"] > 0 for whose in ("ours", "rival") for unit in ("us", "percent"))


@pytest.mark.mpi
@pytest.mark.long
def test_other_libraries_do_the_same_work(bench: Bench, tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    results = bench("compare", "--report", str(report))
    assert not results["skipped"], "asyncdist, mpi4py, gloo and asyncio are always installed"
    parts = {"small_us", "large_ms", "mean_ms"}
    assert {title: parts - figures.keys() for title, figures in results["medians"].items()} == {
        "asyncdist on MPI": set(),
        "asyncdist on torch": set(),
        "mpi4py, buffers": set(),
        "gloo, blocking": set(),
        "asyncio streams": {"mean_ms"},
    }
    assert "| mean of 16 MiB: gloo, blocking " in report.read_text()


@pytest.mark.mpi
@pytest.mark.long
def test_round(bench: Bench) -> None:
    results = bench("round")
    assert results["ours_s"] > 0 and results["period_s"] > 0
    assert results["ratio"] == pytest.approx(results["ours_s"] / results["ideal_s"])
    assert results["ideal_s"] == pytest.approx(sum(results["ideal_parts_s"].values()))
    assert len(results["wire"]) == 3
    for figures in results["wire"].values():
        assert figures["sent_nbytes"] == figures["received_nbytes"] == figures["expected_nbytes"] > 0


@pytest.mark.mpi
@pytest.mark.long
def test_average(bench: Bench) -> None:
    results = bench("average")
    large, small = results["large"], results["small"]
    raw_s = min(large["raw s"], large["raw in place s"])
    for what in ("models", "gradients"):
        assert large[f"{what} ratio"] == pytest.approx(large[f"average_{what} s"] / raw_s)
        assert small[f"{what} speedup"] == pytest.approx(small["per parameter s"] / small[f"average_{what} s"])


@pytest.mark.long
@pytest.mark.parametrize("transport", [pytest.param("mpi", marks=pytest.mark.mpi), "torch"])
def test_first(bench: Bench, transport: str) -> None:
    results = bench("first", "--transport", transport)
    averages = [f"{name}, 1 MiB" for name in ("average_models", "AverageAllPolicy", "DiLoCoPolicy")]
    races = ["raced, float32", "raced, int8"] if transport == "mpi" else []
    assert list(results) == averages + races
    assert all(results[name]["first s"] > 0 and results[name]["later s"] > 0 for name in averages)
    assert all(results[name]["ratio"] > 0 for name in races)


@pytest.mark.mpi
@pytest.mark.long
def test_replay(bench: Bench) -> None:
    results = bench("replay")
    assert results["adds_per_s"] > 0 and results["raw_adds_per_s"] > 0
    assert (results["items"], results["unaccounted_items"]) == (3 * 640, 0)


@pytest.mark.mpi
@pytest.mark.long
def test_straggler(bench: Bench) -> None:
    results = bench("straggler")
    assert results["fast_steps_per_s"].keys() == {"none", "average_all", "selective"}
    assert results["retained"] > results["retained_average_all"] > 0
    assert results["rounds"] >= results["slow_replacements"] >= 1
    assert results["slow_reports"] >= 1


def test_the_costs_of_a_coordinator(runner: ModuleType) -> None:
    """Regression: the stand-in of the engine lacked an attribute that channels read. :func:`test_scale` is long."""
    costs = importlib.import_module("coordinating").coordinator_costs(8, round_count=2)
    assert 2.0 < costs["messages"] <= 3.1 and costs["nbytes"] < 500


@pytest.mark.long
def test_scale(bench: Bench, tmp_path: Path) -> None:
    chart = tmp_path / "scale.png"
    results = bench("scale", "--chart", str(chart))
    assert chart.read_bytes().startswith(b"\x89PNG")
    population = results.pop("population")
    assert population["rounds"] >= 5 and population["messages"] < 110
    (islands,) = results.pop("islands").values()
    assert islands["ranks"] == 64 and islands["rounds"] >= 5 and islands["messages"] < 40 and islands["guests"] >= 1
    empty, rates = results.pop("empty"), results.pop("rates")
    assert empty["ranks"] == 40 and 2 < empty["messages"] < 4
    assert rates["per_s"] > 0 and rates["of_8_per_s"] > 0
    for route, costs in results.pop("coordinator").items():
        assert 0 < costs["us"] < 1000 and 2.0 < costs["messages"] <= 3.1 and costs["nbytes"] < 500, route
    assert list(results) == ["8", "12"]
    assert results["12"]["sharded"]["seconds"] < 0.7 * results["12"]["direct"]["seconds"]
    for by_route in results.values():
        donors, replacers = by_route["direct"]["donors"], by_route["direct"]["replacers"]
        assert by_route["direct"]["streams"] == pytest.approx(donors * replacers)
        assert by_route["sharded"]["streams"] == pytest.approx(donors + replacers - 1)
        for figures in by_route.values():
            assert figures["streams"] < figures["total"] < 1.1 * figures["streams"]
            assert 1.0 <= max(figures["out"], figures["in"]) <= donors


@pytest.mark.mpi
@pytest.mark.long
def test_routes(bench: Bench) -> None:
    """Routes between hosts are measured if virtual hosts can be made; otherwise the output says why not."""
    results = bench("routes")
    assert results.keys() in ({"8"}, {"8", "4"})
    assert all(figures["direct_s"] > 0 and figures["sharded_s"] > 0 for figures in results.values())
    assert results["8"]["rounds"] >= 1


@pytest.mark.mpi
@pytest.mark.long
def test_record(bench: Bench) -> None:
    results = bench("record")
    assert results.keys() == {"plain_us", "recorded_us", "cost_us", "cost_of_mean_us", "nbytes"}
    assert 0 < results["nbytes"] <= 200, "a frame must have at least its header, and at most 200 bytes"


@pytest.mark.long
def test_grace(bench: Bench) -> None:
    results = bench("grace")
    assert list(results) == [
        f"8, {population}" for population in ("equal", "x2", "x10", "x100", "stalls", "heavy tails")
    ]
    for by_window in results.values():
        assert len(by_window) == 6 and all(found["rounds"] > 0 for found in by_window.values())
        assert all(0 < found["share"] <= 1 for found in by_window.values())


@pytest.mark.long
def test_async_diloco_on_ranks_of_different_speeds(bench: Bench) -> None:
    """The order holds for each seed, even with DiLoCo's learning rate for delayed Nesterov."""
    results = bench("async-diloco")
    assert all(len(of_lr) == 1 for of_lr in results.values())
    runs = {method: next(iter(of_lr.values())) for method, of_lr in results.items()}
    for seed in range(2):
        losses = {method: of_seed[seed]["equal_time"] for method, of_seed in runs.items()}
        for method in ("async, delayed Nesterov", "async, delayed Nesterov, dynamic steps"):
            assert losses[method] < losses["one rank"] < losses["DiLoCo"]
            assert losses[method] < losses["async, Nesterov, DiLoCo's lr"] - 0.02
            assert runs[method][seed]["steps"] > 3 * runs["DiLoCo"][seed]["steps"]
        dynamic, fixed = runs["async, delayed Nesterov, dynamic steps"][seed], runs["async, delayed Nesterov"][seed]
        assert dynamic["staleness_max"] < fixed["staleness_max"] / 2


@pytest.mark.long
def test_staleness(bench: Bench, tmp_path: Path) -> None:
    """With equal shards no rank needs to wait for a slow one; if each rank has its own class, it does."""
    chart = tmp_path / "chart.png"
    results = bench("staleness", "--chart", str(chart))
    staleness = importlib.import_module("staleness")
    assert len(staleness.RULES) == 10
    assert results.keys() == {"iid", "one class"}
    relative = {
        shards: {rule: staleness.relative_loss(of_ratio["4"], rule) for rule in staleness.RULES}
        for shards, of_ratio in results.items()
    }
    assert relative["iid"]["SGD"] < 1 < min(relative["one class"].values())
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("shards", ["iid", "Dirichlet 1", "Dirichlet 0.3", "Dirichlet 0.1", "one class"])
def test_all_shards_together_have_each_class_equally(runner: ModuleType, shards: str) -> None:
    staleness = importlib.import_module("staleness")
    for seed in range(4):
        shares = staleness.class_shares(shards, seed)
        assert shares.sum(0).tolist() == pytest.approx([1] * 4) and shares.sum(1).tolist() == pytest.approx([1] * 4)
        assert torch.equal(shares, staleness.class_shares(shards, seed))


def test_the_gradient_without_autograd_is_that_of_autograd(runner: ModuleType) -> None:
    staleness = importlib.import_module("staleness")
    learner = staleness.Learner(seed=1, width=8)
    examples, classes = staleness.Shard(learner.task, staleness.class_shares("iid", 1)[0], seed=2000).draw()
    torch.nn.functional.cross_entropy(learner.model(examples), classes).backward()
    wanted = [parameter.grad.clone() for parameter in learner.model.parameters()]
    learner.step(examples, classes)
    for parameter, gradient in zip(learner.model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("transport", [pytest.param("mpi", marks=pytest.mark.mpi), "torch"])
@pytest.mark.long
def test_idle(bench: Bench, transport: str) -> None:
    results = bench("idle", "--transport", transport)
    assert results.pop("transport") == transport
    rivals = ("", "raw_", "zmq_") if importlib.util.find_spec("zmq") else ("", "raw_")
    assert results.keys() == {f"{rival}{name}" for rival in rivals for name in ("cpu_percent", "wake_us_median")}
    assert 0 < results["cpu_percent"] <= 100
    assert results["wake_us_median"] > 0


@pytest.mark.mpi
@pytest.mark.long
def test_memory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # seven ranks that step without a pause would take a minute on two cores
    monkeypatch.setattr("memory.RANKS", (3, 4))
    results = bench("memory")
    assert list(results) == ["2 peers", "3 peers"]
    for roles in results.values():
        assert roles.keys() == {"donor", "replacer"}
        for figures in roles.values():
            assert 0 < figures["held_nbytes"] <= figures["peak_nbytes"]
            assert figures["held_nbytes"] <= figures["promised_nbytes"]
    assert results["2 peers"]["donor"] == results["3 peers"]["donor"]


def test_an_unknown_benchmark_is_refused(runner: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        runner.main(["speed"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "'speed'" in said and "latency" in said


@pytest.mark.long
def test_sim(bench: Bench) -> None:
    results = bench("sim")
    messages, large, seeds = results["messages"], results["large"], results["seeds"]
    assert messages["ratio"] == pytest.approx(messages["messages_per_s"] / messages["bare_messages_per_s"])
    assert large["ranks"] == 30 and large["messages"] >= 30 and large["seconds"] > 0
    assert list(seeds) == ["best_only", "mean"]
    assert all(found["rounds"] >= 2 and found["digests"] == 2 for found in seeds.values())


@pytest.mark.long
def test_wire_codecs(bench: Bench) -> None:
    results = bench("wire-codecs")
    nbytes = {name: rates.pop("nbytes") for name, rates in results.items()}
    expected = {"float32": 40_000, "bfloat16": 20_000, "float16": 20_160, "int8": 10_160, "q4": 5_160, "topk": 1_806}
    assert nbytes == expected
    assert all(rate > 0 for rates in results.values() for rate in rates.values())


@pytest.mark.long
def test_goodput(bench: Bench, tmp_path: Path) -> None:
    """The figures are in virtual time, so they are the same on every machine."""
    chart = tmp_path / "chart.png"
    results = bench("goodput", "--chart", str(chart))
    learners, mixed = results.pop("learners"), results.pop("mixed")
    assert all(0.4 < figures["100"]["goodput"] < 0.9 for kind, figures in learners.items() if kind != "average-all")
    assert learners["average-all"]["100"]["goodput"] < learners["async"]["100"]["goodput"]
    assert learners["DiLoCo"]["100"]["waited"] > learners["async"]["100"]["waited"]
    for without, failing in (mixed[kind]["8"].values() for kind in mixed):
        assert without["goodput"] > failing["goodput"] > 0.4
    assert mixed["DiLoCo"]["8"]["none"]["goodput"] < 0.8 < 0.99 < mixed["async"]["8"]["none"]["goodput"]
    assert mixed["async"]["8"]["none"]["losses"][0] < mixed["DiLoCo"]["8"]["none"]["losses"][0]
    assert results.keys() == {"selective", "average-all", "alone"}
    for kind, by_size in results.items():
        assert by_size.keys() == {"8"} and by_size["8"].keys() == {"1000", "100"}
        for figures in by_size["8"].values():
            shares = [figures[name] for name in ("goodput", "empty", "died", "waited")]
            assert sum(shares) == pytest.approx(1) and min(shares) > -0.01, kind
    for mtbf in ("1000", "100"):
        selective, average_all = (results[kind]["8"][mtbf] for kind in ("selective", "average-all"))
        assert selective["goodput"] > average_all["goodput"]
        waited_steps = selective["waited"] * selective["steps"]
        assert waited_steps < 15 * selective["failures"], "survivors waited for too many steps after the failures"
    assert results["selective"]["8"]["1000"]["goodput"] > 0.9
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_value(bench: Bench, tmp_path: Path) -> None:
    """The orders hold that theory predicts for each seed; one seed is simulated."""
    results = bench("value", "--chart", str(tmp_path / "chart.png"))
    losses = {
        part: {method: found["loss"] for method, found in by_method.items()} for part, by_method in results.items()
    }
    sent = {name: found["models_sent"] for name, found in results["gaussians, equal"].items()}
    alone, lifted = (results["gaussians, diverges"][name] for name in ("none", "selective, mean"))
    for seed in range(len(sent["WASH"])):
        slow = {name: values[seed] for name, values in losses["times, 10"].items()}
        equal = {name: values[seed] for name, values in losses["gaussians, equal"].items()}
        assert max(slow["async DiLoCo"], slow["selective, mean"]) < slow["LocalSGD"] - 0.2
        together = {name: values[seed] for name, values in losses["times, 1"].items()}
        assert together["LocalSGD"] < together["async DiLoCo"] < slow["LocalSGD"] - 0.2
        assert equal["gradients, every step"] < equal["LocalSGD"] < equal["WASH"]
        assert sent["WASH"][seed] < sent["LocalSGD"][seed] < sent["gradients, every step"][seed]
        assert lifted["worst"][seed] < alone["worst"][seed] / 2, (
            "the rank with a wrong learning rate must end far better with averaging"
        )
        assert lifted["loss"][seed] < alone["loss"][seed]
    for name in ("chart", "chart_bytes", "chart_failures"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_of_value_has_the_tables_of_its_results(runner: ModuleType) -> None:
    """Otherwise run ``python tools/benchmarks/worth/tables.py``."""
    tables = importlib.import_module("worth.tables")
    text = tables.PAGE.read_text()
    assert text.count("<!-- table: ") == len(tables.TABLES)
    assert tables.page(json.loads(tables.RESULTS.read_text())["results"], text) == text


def test_value_counts_equal_virtual_time(runner: ModuleType) -> None:
    """In equal virtual time a rank ten times slower makes a tenth of the steps.

    Local SGD makes the others wait for that rank; selective averaging does not.
    """
    runs = importlib.import_module("worth.runs")

    def simulate(method: str, value: float) -> dict[str, Any]:
        return dict(runs.simulate(runs.Run("gaussians", "slow 10", method, value, seed=3, longer=0.3)))

    alone, selective, waiting = simulate("none", 1.0), simulate("selective, mean", 0.5), simulate("LocalSGD", 0.25)
    assert alone["steps"][3] in (4, 5) and all(count >= 44 for count in alone["steps"][:3])
    assert selective["steps"] == alone["steps"]
    assert max(waiting["steps"]) <= 12
    assert simulate("selective, mean", 0.5) == selective, "equal seeds must give equal results"


@pytest.mark.mpi
@pytest.mark.long
def test_value_of_real_processes_is_that_of_simulated_ones() -> None:
    """Four processes get the simulation's weights, bit for bit; otherwise the program's exit code is 1."""
    said = mpi.run_ranks(4, str(RUN.parent / "worth" / "real.py"), timeout_s=280).check().output()
    assert said.count("weights") == 2


def test_a_chart_is_drawn_of_what_has_one_only(runner: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(["step", "--chart", "chart.png"])
    assert "--chart: step has none; allowed: goodput, scale, staleness, value" in capsys.readouterr().err


def test_every_benchmark_is_run_by_a_test(runner: ModuleType) -> None:
    """The names are read from the first arguments of ``bench`` and ``results_of``, or from the tests' parameters."""
    run: list[str] = []
    for function in ast.walk(ast.parse(Path(__file__).read_text())):
        if not isinstance(function, ast.FunctionDef) or not function.name.startswith("test_"):
            continue
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("bench", "results_of")
            ):
                given = [node.args[0]] if isinstance(node.args[0], ast.Constant) else function.decorator_list
                constants = (found for place in given for found in ast.walk(place) if isinstance(found, ast.Constant))
                run += [found.value for found in constants if isinstance(found.value, str)]
    assert set(runner.NAMES) <= set(run), f"no test runs the benchmarks {set(runner.NAMES) - set(run)}"


def idle_steps(median_us: float, spread: float) -> dict[str, Any]:
    ranks = {f"rank {rank}": {"median_us": median_us, "p99_us": 99.0} for rank in range(2)}
    small = {name: {**figures, "median_us": median_us / spread} for name, figures in ranks.items()}
    return {"85 k": small, "20 M": ranks, "yield": ranks}


def averages(ratio: float, speedup: float) -> dict[str, Any]:
    seconds = {f"{what} s": 1.0 for what in ("average_models", "average_gradients", "raw", "raw in place")}
    seconds |= {"per parameter s": 1.0, "raw per parameter s": 1.0, "nbytes": 1 << 20}
    kinds = ("models", "gradients")
    return {
        "first": {"s": 1.5, "later s": 1.0},
        "large": seconds | {f"{kind} ratio": ratio for kind in kinds},
        "small": seconds | {f"{kind} speedup": speedup for kind in kinds},
    }


def raced(ratio: float) -> dict[str, Any]:
    figures = {"nbytes": 1 << 20, "s": ratio, "raw s": 1.0}
    return {"raced, float32": {**figures, "ratio": ratio}, "raced, int8": {**figures, "ratio": 2.0}}


def adds(per_s: float, lost: int) -> dict[str, Any]:
    return {"adds_per_s": per_s, "raw_adds_per_s": 1.0, "items": 640, "unaccounted_items": lost}


@pytest.mark.parametrize(
    ("name", "results", "missed"),
    [
        ("one-sided", idle_steps(10.0, 1.2), 0),
        ("one-sided", idle_steps(10.1, 1.0), 4),
        ("one-sided", idle_steps(9.0, 9.0), 2),
        ("average", averages(1.2, 3.0), 0),
        ("average", averages(1.21, 3.0), 2),
        ("average", averages(1.0, 2.9), 2),
        ("first", raced(1.0), 0),
        ("first", raced(1.01), 1),
        ("replay", adds(20_000, 0), 0),
        ("replay", adds(19_999, 0), 1),
        ("replay", adds(1e6, 1), 1),
    ],
)
def test_a_figure_that_is_missed_is_told_and_fails_a_check(
    name: str,
    results: dict[str, Any],
    missed: int,
    runner: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(runner, "_measure", lambda *_, **__: results)
    assert runner.main([name]) == 0
    assert runner.main([name, "--check"]) == (1 if missed else 0)
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("missed: ")]
    assert [line.count(";") + 1 for line in told] == [missed] * 2 * bool(missed)


def test_a_benchmark_that_fails_is_a_failure_without_a_check(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_measure", lambda *_, **__: None)
    assert runner.main(["step"]) == runner.main(["all"]) == 1
