"""Tests the demo's own logic (arguments, diaries and results), and runs the whole demo for a short time."""

import argparse
import io
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from support import warm
from support.mpi import base_environment, require_mpi

import protocols
from protocols import ReplayStatistics, ReplicaAveragingPolicy, SpawnPolicy, StepInfo

HYPERGRID = Path(__file__).resolve().parents[2] / "tools" / "hypergrid"
sys.path.insert(0, str(HYPERGRID))
import demo  # noqa: E402
import display  # noqa: E402
import verify  # noqa: E402
from chart import draw  # noqa: E402
from diary import BufferRecorder, Recorder  # noqa: E402
from history import RankHistory, first_time, summarise  # noqa: E402
from policies import POLICIES  # noqa: E402

sys.path.remove(str(HYPERGRID))


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--ranks", "0"], "--ranks: '0' is not a whole number from 1 to 64"),
        (["--ranks", "four"], "--ranks: 'four' "),
        (["--iterations", "0"], "--iterations: '0' "),
        (["--iterations", "-3"], "--iterations: '-3' "),
        (["--seed", "1.5"], "--seed: '1.5' "),
        (["--policy", "best"], "--policy: invalid choice: 'best'"),
        (["--slow-rank", "1"], "--slow-rank: '1' is not R:FACTOR, a rank and a number from 1 to 1000"),
        (["--slow-rank", "1:0.5"], "--slow-rank: '1:0.5' "),
        (["--slow-rank", "4:5"], "--slow-rank: there is no rank 4; --ranks 4 allows 0 to 3"),
        (["--transport", "nccl"], "--transport: invalid choice: 'nccl' (choose from 'mpi', 'torch')"),
        (["--buffer-ranks", "-1"], "--buffer-ranks: '-1' "),
        (
            ["--ranks", "2", "--buffer-ranks", "3"],
            "--buffer-ranks: 3 buffers for 2 training ranks; --ranks 2 allows 0 to 2",
        ),
        (["--verify", "--policy", "none"], "--verify: nothing to verify with --policy none; allowed with selective"),
        (["--json", "/nowhere/at/all.json"], "--json: '/nowhere/at/all.json' lies in a directory that does not exist"),
        (["--chart", "chart.jpg"], "--chart: 'chart.jpg' does not end in .png"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["--kill", "1"], "'1' is not R@SECONDS, a rank and the time since training began (0@20)"),
        (["--kill", "4@2"], "no rank 4 trains; --ranks 4 allows 0 to 3"),
        (["--kill", "1@2", "--kill", "1@3"], "each dies once, and one has to be left"),
        (["--ranks", "1", "--kill", "0@2"], "each dies once, and one has to be left"),
        (["--kill", "1@2", "--transport", "torch"], "allowed with --transport mpi"),
        (["--kill", "1@2", "--policy", "average-all"], "an average of all needs all"),
        (["--kill", "1@2", "--verify"], "may not have written down its last average"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(
    arguments: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        demo.parse_arguments(arguments)
    error = capsys.readouterr().err
    assert raised.value.code == 2
    assert wanted in error
    assert error.startswith("demo: ")
    assert error.count("\n") == 1


def test_arguments_reach_the_training_script() -> None:
    options = demo.parse_arguments(["--ranks", "3", "--slow-rank", "1:2.5", "--seed", "7", "--quick", "--verify"])
    command = demo.training_command(options, Path("/diaries"))
    text = " ".join(command)
    assert command[1:8] == ["-m", "asyncdist", "run", "--transport", "mpi", "-n", "3"]
    assert command[8:11] == ["--record", "/diaries/recording", str(HYPERGRID / "train.py")]
    assert "--slow-rank 1 --slow-factor 2.5" in text
    assert "--seed 7" in text
    assert "--iterations 300" in text
    assert "--seconds 18.0" in text
    assert "--log-dir /diaries" in text
    assert command[-1] == "--verify"


def test_a_job_in_which_ranks_are_killed_is_one_that_survives() -> None:
    command = demo.training_command(demo.parse_arguments(["--kill", "0@2.5"]), Path("/diaries"))
    assert command[6:9] == ["-n", "4", "--survive"]
    assert "--survive" not in demo.training_command(demo.parse_arguments([]), Path("/diaries"))


def test_buffer_ranks_come_on_top_of_those_that_train() -> None:
    options = demo.parse_arguments(["--ranks", "3", "--buffer-ranks", "2", "--transport", "torch"])
    command = demo.training_command(options, Path("/diaries"))
    assert command[4:8] == ["--transport", "torch", "-n", "5"]
    assert command[11:13] == ["--buffer-ranks", "2"]


def test_each_policy_has_a_name_in_the_demo() -> None:
    """All but the policy for replicas of several ranks, because each rank of the demo trains a whole model."""
    exported = {getattr(protocols, name) for name in protocols.__all__}
    policies = {kind for kind in exported if isinstance(kind, type) and issubclass(kind, SpawnPolicy)}
    assert set(POLICIES.values()) == policies - {SpawnPolicy, ReplicaAveragingPolicy}


def test_iterations_given_by_the_user_are_not_cut_short_by_time() -> None:
    command = demo.training_command(demo.parse_arguments(["--iterations", "5000"]), Path("/diaries"))
    assert "--seconds" not in command
    assert command[command.index("--iterations") + 1] == "5000"


# -- diaries and results ----------------------------------------------------------------------------------------------


def write_diary(
    directory: Path, rank: int, *, replaced: int, metric: float, replay: dict[str, Any] | None = None
) -> None:
    """Write a diary as a rank does: 41 steps, some of which replaced the rank's weights."""
    record = Recorder(directory, rank)
    record.start(transport="mpi", ranks=2, mode_count=16, parameter_count=21382)
    for iteration in range(1, 41):
        applied = StepInfo(True, round=iteration, donors=(1 - rank,), weights=(1.0,))
        info = applied if iteration > 40 - replaced else None
        record.step(iteration, metric, 1e-5 * (rank + 1), info)
    record._last = -1.0  # a quarter of a second has passed
    record.step(41, metric, 1e-5 * (rank + 1), None)
    modes = {3, 10 + rank}
    record.end(iteration=41, metric=metric, modes=modes, l1_distance=0.5 + rank, statistics=None, replay=replay)


@pytest.fixture
def histories(tmp_path: Path) -> list[RankHistory]:
    """Return two finished ranks, of which rank 1 is better."""
    write_diary(tmp_path, 0, replaced=3, metric=-0.5)
    write_diary(tmp_path, 1, replaced=0, metric=-0.25)
    found = [RankHistory(rank, tmp_path) for rank in range(2)]
    for history in found:
        history.poll()
    return found


def test_results_have_what_the_json_promises(histories: list[RankHistory]) -> None:
    result = summarise(histories, policy="selective", seed=0, verified_count=3)
    assert result["transport"] == "mpi"
    assert result["ranks"] == 2
    assert result["iterations"] == [41, 41]
    assert result["replacements"] == [3, 0]
    assert result["rounds"] == 3
    assert result["modes_found"] == 3  # states 3, 10 and 11
    assert result["modes_found_by_rank"] == [2, 2]
    assert result["best_rank"] == 1
    assert result["l1_distance"] == 1.5
    assert result["step_overhead_us"] == pytest.approx(20.0)
    assert result["stall_s"] == pytest.approx(41 * 3e-5)
    assert result["verified_averages"] == 3
    assert result["wall_s"] >= 0
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def write_buffer_diary(directory: Path, rank: int, clients: list[int]) -> None:
    """Write a diary as a replay buffer does: 41 batches of 16 states from each client; it keeps 2,000 states."""
    record = BufferRecorder(directory, rank)
    record.start(transport="torch", clients=clients)
    record.held(size=32, mean_reward=0.25, modes=[3])
    done = ReplayStatistics(
        added=dict.fromkeys(clients, 656), drawn=dict.fromkeys(clients, 160), size=1000, evicted_count=312,
        stale_update_count=0,
    )  # fmt: skip
    record.end(clients=clients, capacity=1000, mean_reward=0.5, modes=[3, 10], **asdict(done))


def test_replay_buffers_are_part_of_results_and_display(tmp_path: Path) -> None:
    drawn = {"batches": 10, "mean_reward_added": 0.25, "mean_reward_drawn": 0.75, "wait_s": 0.5}
    idle = {"batches": 0, "mean_reward_added": 0.75, "mean_reward_drawn": None, "wait_s": 0.25}
    write_diary(tmp_path, 0, replaced=1, metric=-0.5, replay=drawn)
    write_diary(tmp_path, 1, replaced=0, metric=-0.25, replay=idle)
    write_buffer_diary(tmp_path, 2, [0, 1])
    *found, buffer = [RankHistory(rank, tmp_path) for rank in range(3)]
    assert display.buffer_line(buffer) == "rank 2 is a replay buffer and holds nothing yet"
    for history in (*found, buffer):
        history.poll()
    assert display.buffer_line(buffer) == (
        "rank 2 is a replay buffer and holds 32 states, 1 different mode, mean reward 0.250"
    )
    result = summarise(found, policy="selective", seed=0, verified_count=1, buffers=[buffer])
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["ranks"] == 2
    assert result["replay"] == [drawn, idle]
    assert result["buffers"] == [
        {
            "rank": 2, "clients": [0, 1], "capacity": 1000, "size": 1000, "added": {"0": 656, "1": 656},
            "drawn": {"0": 160, "1": 160}, "evicted_count": 312, "mean_reward": 0.5, "modes": [3, 10],
        }
    ]  # fmt: skip
    text = shown(display.buffer_table(result))
    for words in ("0, 1", "1312", "320", "312", "1000 of 1000", "2 of 16", "0.500"):
        assert words in text
    assert "They drew 10 batches from replay buffers, of mean reward 0.750 where they had found 0.500, and waited " in (
        line := demo.closing_line(result, verify=True)
    )
    assert "0.75 s" in line
    assert demo.chart_title(result).startswith(
        "2 ranks train a GFlowNet on an 8 x 8 x 8 x 8 grid\nwith a replay buffer;"
    )
    assert "outer optimizer" in demo.chart_title({**result, "policy": "diloco"})
    assert "changes that help" in demo.chart_title({**result, "policy": "selective-diloco"})
    assert "copies one" in demo.chart_title({**result, "policy": "population-training"})
    assert "when it arrives" in demo.chart_title({**result, "policy": "async-diloco"})


def shown(table: Table) -> str:
    """Return the text that a terminal would show."""
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_log_says_what_buffers_hold(tmp_path: Path) -> None:
    write_diary(tmp_path, 0, replaced=0, metric=-0.5)
    write_buffer_diary(tmp_path, 1, [0])
    trainer, buffer = (RankHistory(rank, tmp_path) for rank in range(2))
    trainer.poll()
    buffer.poll()
    end, trainer.end = trainer.end, None
    console = Console(width=200, file=io.StringIO())
    with display.Display(console, [trainer], 41, [buffer]) as view:
        view.update(None)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[1].endswith(" s  " + display.buffer_line(buffer))
    trainer.end = end
    with display.Display(console, [trainer], 41, [buffer]) as view:
        view.update(None)
    assert console.file.getvalue().splitlines() == lines  # nothing changes after the end


def test_results_survive_a_metric_that_is_no_number(tmp_path: Path) -> None:
    write_diary(tmp_path, 0, replaced=0, metric=float("nan"))
    write_diary(tmp_path, 1, replaced=0, metric=-9.0)
    found = [RankHistory(rank, tmp_path) for rank in range(2)]
    for history in found:
        history.poll()
    result = summarise(found, policy="none", seed=0, verified_count=None)
    assert result["best_rank"] == 1
    assert result["metric"] == [None, -9.0]
    json.dumps(result, allow_nan=False)
    display.live_table(found, 41, first_time(found), None)
    display.result_table(result)


def test_rounds_are_counted_by_the_coordinator_if_there_is_one(histories: list[RankHistory]) -> None:
    assert histories[0].end is not None
    histories[0].end["statistics"] = {"coordinator": {"rounds_decided": 5}}
    assert summarise(histories, policy="selective", seed=0, verified_count=None)["rounds"] == 5


def test_a_diary_is_read_while_it_is_written(tmp_path: Path) -> None:
    history = RankHistory(0, tmp_path)
    history.poll()
    assert history.start is None
    assert history.latest["iteration"] == 0
    line = json.dumps({"kind": "progress", "time": 1.0, "iteration": 7, "metric": -1.0, "rate": 30.0}) + "\n"
    path = tmp_path / "rank0.jsonl"
    path.write_text(line + line[:20])
    history.poll()
    assert len(history.progress) == 1
    with open(path, "a") as file:
        file.write(line[20:])
    history.poll()
    assert len(history.progress) == 2
    assert history.rate == 30.0


def test_a_rank_that_runs_alone_prints(capsys: pytest.CaptureFixture[str]) -> None:
    record = Recorder(None, 0)
    record.start(transport="local", ranks=1, mode_count=16, parameter_count=10)
    record.step(1, -2.0, 1e-5, None)
    record.end(iteration=1, metric=-2.0, modes={1}, l1_distance=1.0, statistics=None)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["start", "end"]


def test_the_chart_is_a_picture(histories: list[RankHistory], tmp_path: Path) -> None:
    result = summarise(histories, policy="selective", seed=0, verified_count=None)
    draw(tmp_path / "chart.png", histories, title=demo.chart_title(result))
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("values", "wanted"),
    [([], ""), ([1.0], "▁"), ([1.0, 1.0], "▁▁"), ([0.0, 7.0], "▁█"), ([0.0, float("nan"), 7.0], "▁ █")],
)
def test_spark_lines(values: list[float], wanted: str) -> None:
    assert display.spark_line(values) == wanted


def test_spark_lines_keep_their_width_and_the_newest_value() -> None:
    line = display.spark_line([float(value) for value in range(1000)], width=10)
    assert len(line) == 10
    assert line[-1] == "█"


def test_the_traceback_of_the_first_rank_that_failed_is_found() -> None:
    output = (
        "some warning\n"
        "asyncdist: rank 2 failed:\nTraceback (most recent call last):\n  File 'train.py'\nValueError: no\n"
        "asyncdist: rank 0 stopped: rank 2 failed: ValueError: no\n"
        "--------------------------------------------------------------------------\nmpirun noticed\n"
    )
    assert demo.first_traceback(output).splitlines()[0] == "asyncdist: rank 2 failed:"
    assert demo.first_traceback(output).splitlines()[-1] == "ValueError: no"
    by_torch = "asyncdist: rank 1 failed:\nTraceback\nValueError: no\nasyncdist run: rank 1 ended with exit code 1\n"
    assert demo.first_traceback(by_torch).splitlines()[-1] == "ValueError: no"
    assert demo.first_traceback("mpirun: no slots") == ""
    assert demo.last_lines("a\nb\nc\n", 2) == "b\nc"


def test_an_average_without_a_trace_fails_the_demo(histories: list[RankHistory], tmp_path: Path) -> None:
    job = SimpleNamespace(exit_code=0)
    shown = SimpleNamespace(update=lambda count: None)
    with pytest.raises(verify.VerificationError, match="3 averages were applied, but 0 left a trace"):
        demo.watch(job, histories, shown, verify.Verifier(tmp_path), demo.Killer(histories, []))


def test_a_job_that_fails_fails_the_demo(histories: list[RankHistory]) -> None:
    job = SimpleNamespace(exit_code=3, explain_failure=lambda: "the training failed with exit code 3.")
    shown = SimpleNamespace(update=lambda count: None)
    with pytest.raises(demo.DemoError, match="exit code 3"):
        demo.watch(job, histories, shown, None, demo.Killer(histories, []))


def test_a_job_is_stopped_with_its_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"]
    output = tmp_path / "output.txt"
    with demo.Job(command, [], output) as job:
        assert job.exit_code is None
        while not output.read_text():
            pass
    assert job.exit_code not in (None, 0)


def test_options_are_a_namespace() -> None:
    options = demo.parse_arguments([])
    assert isinstance(options, argparse.Namespace)
    assert (options.ranks, options.iterations, options.policy, options.verify) == (4, 2000, "selective", False)


# -- torchgfn, in processes of its own: importing it changes multiprocessing's start method ---------------------------

EXACT = """
import torch
from evaluate import all_states, l1_distance, mode_count, terminal_probabilities
from train import build_env, build_model
env = build_env()
model, _ = build_model(env)
assert torch.equal(env.get_states_indices(all_states(env)), torch.arange(8**4))
assert mode_count(env) == 16
for parameter in model.parameters():
    torch.nn.init.zeros_(parameter)
chances = terminal_probabilities(env, model)
assert abs(float(chances.sum()) - 1) < 1e-5
assert abs(float(chances[0]) - 1 / 5) < 1e-6   # four directions and the exit, all alike
assert abs(float(chances[1]) - 1 / 25) < 1e-6  # one step, then the exit
assert 1 < l1_distance(env, model) < 2
"""


REPLAY = """
import torch
from evaluate import all_states
from diary import BufferRecorder
from buffers import CAPACITY, Contents, walk_back
from train import BATCH_SIZE, build_env, build_model
env = build_env()
model, _ = build_model(env)
everywhere, origin = all_states(env)[:: 37], torch.zeros(BATCH_SIZE, 4, dtype=torch.long)
for states in (everywhere, origin):
    trajectories = walk_back(env, model, states)
    assert torch.equal(trajectories.terminating_states.tensor, states)
    own = trajectories.log_rewards
    assert torch.equal(model.loss(env, trajectories), model.loss(env, trajectories, log_rewards=own))
    assert not torch.equal(model.loss(env, trajectories), model.loss(env, trajectories, log_rewards=own + 1))

contents = Contents(env, BufferRecorder(None, 0))
assert contents.summary() == {"size": 0, "mean_reward": None, "modes": []}
states = all_states(env)
log_rewards = env.log_reward(env.states_from_tensor(states))
for _ in range(2):
    contents.note({"state": states, "log_reward": log_rewards})
told = contents.summary()
assert told["size"] == 2 * 8**4 <= CAPACITY
assert len(told["modes"]) == 16
assert abs(told["mean_reward"] - float(log_rewards.exp().mean())) < 1e-6
desert = torch.tensor([[3, 3, 3, 3]]).expand(CAPACITY, -1)  # makes room of all that was there
contents.note({"state": desert, "log_reward": torch.full((CAPACITY,), 0.01).log()})
told = contents.summary()
assert (told["size"], told["modes"]) == (CAPACITY, [])
assert abs(told["mean_reward"] - 0.01) < 1e-6
"""


@pytest.mark.long
def test_grid_chances_are_exact_and_buffer_items_are_usable() -> None:
    """This runs in one process, because importing torchgfn takes seconds."""
    done = subprocess.run(
        [sys.executable, "-c", EXACT + REPLAY], cwd=HYPERGRID, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("transport", "clients", "iterations"),
    [
        pytest.param("mpi", [[0, 2], [1]], 16, marks=[pytest.mark.mpi, pytest.mark.long]),
        pytest.param("torch", [[0, 1]], 8, marks=pytest.mark.long),
    ],
)
def test_the_whole_demo_with_replay_buffers(
    transport: str, clients: list[list[int]], iterations: int, tmp_path: Path
) -> None:
    """``clients``: The clients of each buffer rank; only they add items to it and draw from it."""
    if transport == "mpi":
        require_mpi()
    ranks = sum(map(len, clients))
    command = [sys.executable, str(HYPERGRID / "demo.py"), "--transport", transport, "--ranks", str(ranks), "--verify"]
    command += [
        "--buffer-ranks",
        str(len(clients)),
        "--quick",
        "--iterations",
        str(iterations),
        "--json",
        "results.json",
    ]
    env = warm.environment(base_environment(), *warm.LIBRARIES)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=380)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    result = json.loads((tmp_path / "results.json").read_text())
    assert (result["transport"], result["ranks"]) == (transport, ranks)
    counts = result["iterations"]
    assert max(counts) <= iterations  # the limit of 18 s may end the run earlier
    assert result["verified_averages"] == sum(result["replacements"])
    assert [(buffer["rank"], buffer["clients"]) for buffer in result["buffers"]] == list(enumerate(clients, ranks))
    for buffer, served in zip(result["buffers"], clients, strict=True):
        assert buffer["added"] == {str(rank): 16 * counts[rank] for rank in served}
        assert buffer["drawn"] == {str(rank): 16 * (counts[rank] // 4) for rank in served}
        assert buffer["size"] == sum(buffer["added"].values())
    assert (tmp_path / "hypergrid.png").read_bytes().startswith(b"\x89PNG")
    assert "report: hypergrid.html" in done.stdout
    report = (tmp_path / "hypergrid.html").read_text()
    assert f"<td>{sum(counts):,} on all ranks</td>" in report
    assert f" with {sum(result['replacements']):,} replacements" in report
    assert f"{ranks} ranks over {transport}, policy selective" in done.stdout
    assert "They drew " in done.stdout


@pytest.mark.long
def test_the_training_script_runs_alone() -> None:
    command = [sys.executable, str(HYPERGRID / "train.py"), "--iterations", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    start, end = done.stdout.splitlines()
    assert start.startswith("rank 0: start: transport local, ranks 1, mode_count 16")
    assert end.startswith("rank 0: end: iteration 3,")
    assert done.stderr == ""
