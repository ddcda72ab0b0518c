"""Trains a GFlowNet on several ranks and shows it live; ends with a table, a chart and, if asked, a JSON file.

It starts `train.py` with `asyncdist run`, on any transport, and reads the diaries that the ranks write (`diary.py`,
`history.py`). It does not take part in the training. The ranks never outlive it, however it ends.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from chart import draw
from display import Display, buffer_table, result_table
from history import RankHistory, first_time, summarise
from policies import CHOICES, SIMPLE
from rich.console import Console
from verify import VerificationError, Verifier

from asyncdist.recording.reader import RecordingError, read_recording
from asyncdist.report.page import render
from asyncdist.wording import plural

HERE = Path(__file__).resolve().parent
TOP = HERE.parent.parent
POLL_PERIOD_S = 0.25
STOP_SIGNALS = ((signal.SIGINT, 20.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))
"""Signals sent to a job that must end, and the seconds to wait after each."""
RANKS_MAX = 64
ITERATIONS, AVERAGE_EVERY, SECONDS = 2000, 50, 120.0
RECORDING = "recording"
"""The folder's name, next to the diaries."""
QUICK_ITERATIONS, QUICK_AVERAGE_EVERY, QUICK_SECONDS = 300, 20, 18.0


DESCRIPTION = """Train a GFlowNet on several ranks, show the training live, and end with a table, a chart and a report.
The chart and the report are files in the current folder."""


class DemoError(Exception):
    """Raised if the demo cannot continue; the message is for the user."""


# -- arguments --------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Reports wrong input in one line on standard error and exits with code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"demo: {message}\n")


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """Make an argument type for whole numbers in a range."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return int(text)

    return parse


def slow_rank(text: str) -> tuple[int, float]:
    """Parse `R:FACTOR`; the rank's existence is checked later."""
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]+(?:\.[0-9]+)?)", text)
    if match is None or not 1.0 <= float(match[2]) <= 1000.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not R:FACTOR, a rank and a number from 1 to 1000 (1:5, say)")
    return int(match[1]), float(match[2])


def kill(text: str) -> tuple[int, float]:
    """Parse `R@SECONDS`; the rank's existence is checked later."""
    match = re.fullmatch(r"([0-9]{1,9})@([0-9]{1,6}(?:\.[0-9]+)?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not R@SECONDS, a rank and the time since training began (0@20)")
    return int(match[1]), float(match[2])


def output_file(*suffixes: str) -> Callable[[str], Path]:
    """Make an argument type for output files. It rejects a bad path before the training, not after it."""

    def parse(text: str) -> Path:
        path = Path(text).expanduser()
        if suffixes and path.suffix not in suffixes:
            raise argparse.ArgumentTypeError(f"{text!r} does not end in {' or '.join(suffixes)}")
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is a directory; name a file in it")
        if not path.absolute().parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} lies in a directory that does not exist")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise argparse.ArgumentTypeError(f"{text!r} may not be written")
        return path

    return parse


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line; exit with code 2 if an argument is wrong."""
    parser = Parser(prog="./tools/demo", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--ranks", type=whole_number(1, RANKS_MAX), default=4, metavar="N", help="ranks that train (4)")
    parser.add_argument(
        "--buffer-ranks", type=whole_number(0, RANKS_MAX), default=0, metavar="K",
        help="number of further ranks that store the others' states, and return samples to learn from (0)",
    )  # fmt: skip
    parser.add_argument(
        "--transport", choices=("mpi", "torch"), default="mpi", help="transport between the ranks (mpi)"
    )
    parser.add_argument("--hosts", metavar="HOST:RANKS,...", help="hosts on which the ranks run, by ssh (this host)")
    parser.add_argument(
        "--iterations", type=whole_number(1, 10**9), metavar="N",
        help="training steps; the first rank to make them ends the training "
        f"({ITERATIONS}, but {SECONDS:g} s at most if not given)",
    )  # fmt: skip
    parser.add_argument(
        "--policy",
        choices=CHOICES,
        default="selective",
        help="averaging policy (selective)",
    )
    parser.add_argument("--seed", type=whole_number(0, 10**9), default=0, metavar="N", help="random seed (0)")
    parser.add_argument(
        "--slow-rank", type=slow_rank, metavar="R:FACTOR", help="rank R takes FACTOR times as long for a training step"
    )
    parser.add_argument(
        "--kill", type=kill, action="append", default=[], metavar="R@SECONDS",
        help="kill rank R with kill -9 this many seconds after training began; repeatable. The others continue",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ITERATIONS} iterations, in {QUICK_SECONDS:g} s at most"
    )
    parser.add_argument("--verify", action="store_true", help="recompute every average from its donors, bit for bit")
    parser.add_argument("--json", type=output_file(), metavar="PATH", help="write the results there")
    parser.add_argument(
        "--chart",
        type=output_file(".png"),
        default=Path("hypergrid.png"),
        metavar="PATH",
        help="the chart (hypergrid.png)",
    )
    parser.add_argument(
        "--report",
        type=output_file(".html"),
        default=Path("hypergrid.html"),
        metavar="PATH",
        help="file for the report of asyncdist report (hypergrid.html)",
    )
    options = parser.parse_args(arguments)
    if options.slow_rank is not None and options.slow_rank[0] >= options.ranks:
        rank, last = options.slow_rank[0], options.ranks - 1
        parser.error(f"argument --slow-rank: there is no rank {rank}; --ranks {options.ranks} allows 0 to {last}")
    if options.buffer_ranks > options.ranks:
        parser.error(
            f"argument --buffer-ranks: {options.buffer_ranks} buffers for {options.ranks} training ranks; "
            f"--ranks {options.ranks} allows 0 to {options.ranks}, since each serves one or more"
        )
    if options.verify and options.policy != "selective":
        parser.error(f"argument --verify: nothing to verify with --policy {options.policy}; allowed with selective")
    check_kills(parser, options)
    options.seconds = QUICK_SECONDS if options.quick else SECONDS if options.iterations is None else None
    if options.iterations is None:
        options.iterations = QUICK_ITERATIONS if options.quick else ITERATIONS
    return options


def check_kills(parser: Parser, options: argparse.Namespace) -> None:
    """Reject kills that the job would not survive, or that would make its results meaningless."""
    killed = [rank for rank, _ in options.kill]
    for rank in killed:
        if rank >= options.ranks:
            allowed = f"--ranks {options.ranks} allows 0 to {options.ranks - 1}"
            parser.error(f"argument --kill: no rank {rank} trains; {allowed}")
    if killed and options.hosts:
        parser.error("argument --kill: allowed on this host, not with --hosts")
    if killed and (len(set(killed)) < len(killed) or len(killed) == options.ranks):
        parser.error(f"argument --kill: ranks {killed} of {options.ranks}; each dies once, and one has to be left")
    if killed and (options.transport != "mpi" or options.policy == "average-all" or options.verify):
        parser.error(
            "argument --kill: allowed with --transport mpi (under asyncdist run --transport torch a rank's death ends "
            "the job), not with --policy average-all (an average of all needs all), nor with --verify (a rank that is "
            "killed may not have written down its last average)"
        )


# -- the ranks --------------------------------------------------------------------------------------------------------


def training_command(options: argparse.Namespace, directory: Path) -> list[str]:
    """Return the command that starts all ranks."""
    size = options.ranks + options.buffer_ranks
    command = [sys.executable, "-m", "asyncdist", "run", "--transport", options.transport, "-n", str(size)]
    command += ["--hosts", options.hosts] * bool(options.hosts)
    command += ["--survive"] * bool(options.kill)
    command += ["--record", str(directory / RECORDING)]
    command += [str(HERE / "train.py"), "--buffer-ranks", str(options.buffer_ranks)]
    command += ["--policy", options.policy, "--iterations", str(options.iterations), "--seed", str(options.seed)]
    command += ["--average-every", str(QUICK_AVERAGE_EVERY if options.quick else AVERAGE_EVERY)]
    command += ["--log-dir", str(directory)]
    if options.seconds is not None:
        command += ["--seconds", str(options.seconds)]
    if options.slow_rank is not None:
        command += ["--slow-rank", str(options.slow_rank[0]), "--slow-factor", str(options.slow_rank[1])]
    if options.verify:
        command.append("--verify")
    return command


class Job:
    """Runs the launcher and its ranks. A context manager; no process is left when its block ends.

    The job has its own session, so that Ctrl-C reaches only this process, which then stops the job once.

    Args:
        command: Command line of the launcher.
        histories: Histories of the ranks on this host. Only the launcher ends ranks on other hosts, since their process
            ids name different processes here.
        output: File for the job's output.
    """

    def __init__(self, command: Sequence[str], histories: Sequence[RankHistory], output: Path) -> None:
        self._histories = histories
        self._output = output
        paths = [str(TOP), *filter(None, [os.environ.get("PYTHONPATH")])]
        with open(output, "wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        # A second Ctrl-C would leave processes behind; stopping the job takes only a moment.
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._end()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _end(self) -> None:
        for number, patience_s in STOP_SIGNALS:
            if self.exit_code is not None:
                break
            self._process.send_signal(number)
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue
        for history in self._histories:
            history.poll()
            if history.start is not None:
                end_process(history.start["pid"])

    @property
    def exit_code(self) -> int | None:
        """The launcher's exit code, or None while it runs."""
        return self._process.poll()

    def explain_failure(self) -> str:
        """Return an error message with the first traceback in the ranks' output, or the output's last lines."""
        text = self._output.read_text(errors="replace")
        return f"the training failed with exit code {self.exit_code}.\n{first_traceback(text) or last_lines(text)}"


def end_process(pid: int, patience_s: float = 5.0) -> None:
    """Wait for a process to end, and kill it if it still runs after `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)


def first_traceback(text: str) -> str:
    """Return the first `asyncdist: rank N failed:` in the output with its traceback, or ''."""
    match = re.search(
        r"^asyncdist: rank \d+ failed:\n.*?(?=^asyncdist(?: run)?: |^-{40,}|^\[[^\]\n]+\] |\Z)", text, re.M | re.S
    )
    return match[0].rstrip() if match else ""


def last_lines(text: str, count: int = 40) -> str:
    """Return the last lines of the output."""
    return "\n".join(text.rstrip().splitlines()[-count:])


# -- the demo ---------------------------------------------------------------------------------------------------------


class Killer:
    """Kills ranks at the times that `--kill` gives.

    Args:
        histories: Histories of the ranks that train.
        kills: Rank and time of each kill, in seconds since training began.
    """

    def __init__(self, histories: Sequence[RankHistory], kills: Sequence[tuple[int, float]]) -> None:
        self._histories = histories
        self._due = sorted(kills, key=lambda kill: kill[1])

    def poll(self) -> None:
        """Kill the ranks whose kill is due, unless they have ended."""
        zero = first_time(self._histories)
        while zero is not None and self._due and time.time() - zero >= self._due[0][1]:
            history = self._histories[self._due.pop(0)[0]]
            if history.start is not None and history.end is None:
                os.kill(history.start["pid"], signal.SIGKILL)
                history.killed_at = time.time()


def watch(
    job: Job, histories: Sequence[RankHistory], display: Display, verifier: Verifier | None, killer: Killer
) -> None:
    """Follow the job until it ends.

    Args:
        job: The launcher.
        histories: Histories of all ranks.
        display: Shows them.
        verifier: Checks the averages.
        killer: Kills ranks.

    Raises:
        DemoError: It failed.
        VerificationError: An average is wrong.
    """
    ended = False
    while not ended:
        ended = job.exit_code is not None  # read once more after the end
        for history in histories:
            history.poll()
        if not ended:
            killer.poll()
        if verifier is not None:
            verifier.poll()
        display.update(None if verifier is None else verifier.verified_count)
        if not ended:
            time.sleep(POLL_PERIOD_S)
    if job.exit_code != 0:
        raise DemoError(job.explain_failure())
    silent = [history.rank for history in histories if history.end is None and history.killed_at is None]
    if silent:
        raise DemoError(f"the job ended, but ranks {silent} left no result")
    replaced_count = sum(len(history.replaced) for history in histories)
    if verifier is not None and verifier.verified_count != replaced_count:
        raise VerificationError(f"{replaced_count} averages were applied, but {verifier.verified_count} left a trace")


def run(options: argparse.Namespace, console: Console) -> None:
    """Train, watch, and show the results.

    Raises:
        DemoError: The training failed.
        VerificationError: An average is wrong.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hypergrid-")))
        all_histories = [RankHistory(rank, directory) for rank in range(options.ranks + options.buffer_ranks)]
        histories, buffers = all_histories[: options.ranks], all_histories[options.ranks :]
        verifier = Verifier(directory) if options.verify else None
        here = [] if options.hosts else all_histories
        job = stack.enter_context(Job(training_command(options, directory), here, directory / "output.txt"))
        display = stack.enter_context(Display(console, histories, options.iterations, buffers))
        watch(job, all_histories, display, verifier, Killer(histories, options.kill))
        report = write_report(directory / RECORDING, options.report)
    verified_count = None if verifier is None else verifier.verified_count
    result = summarise(
        histories, policy=options.policy, seed=options.seed, verified_count=verified_count, buffers=buffers
    )
    console.print(result_table(result))
    if buffers:
        console.print(buffer_table(result))
    console.print(closing_line(result, options.verify), highlight=False, soft_wrap=True)
    draw(options.chart, histories, title=chart_title(result))
    console.print(f"chart: {options.chart}", highlight=False, soft_wrap=True)
    console.print(f"report: {report}", highlight=False, soft_wrap=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        console.print(f"results: {options.json}", highlight=False, soft_wrap=True)


def write_report(folder: Path, path: Path) -> str:
    """Draw the job's recording; return the report's path, or a string that says why there is none."""
    try:
        path.write_text(render(read_recording(folder)), encoding="utf-8")
    except (RecordingError, OSError) as error:
        return f"none, {error}"
    return str(path)


def closing_line(result: dict[str, Any], verify: bool) -> str:
    """Return the results as sentences."""
    best, count = result["best_rank"], sum(result["replacements"])
    killed = [f"rank {one['rank']} at {one['at_s']:.1f} s" for one in result["killed"]]
    overhead_us = result["step_overhead_us"]
    lines = [
        f"The ranks found {result['modes_found']} of {result['modes_total']} modes in {result['wall_s']:.1f} s.",
        f"Rank {best}, best by its metric, samples within an L1 distance of {result['l1_distance']:.3f} of the true "
        "distribution (0 is perfect, 2 the worst).",
        f"{plural(count, 'average')} applied, {plural(result['rounds'], 'round')}. "
        f"Together the ranks spent {result['stall_s']:.2f} s in policy.step"
        + ("." if overhead_us is None else f", {overhead_us:.1f} us (median) where nothing was applied."),
    ]
    if killed:
        rest = f"the other {result['ranks']}" if result["ranks"] > 1 else "the other one"
        lines.insert(0, f"Killed: {', '.join(killed)}; {rest} trained to the end. The results are theirs.")
    if result["replay"]:
        lines.append(replay_line(result["replay"]))
    if verify:
        count = result["verified_averages"]
        lines.append(f"All {count} averages equal those recomputed from the donors' own snapshots, bit for bit.")
    return "\n".join(lines)


def replay_line(replay: Sequence[dict[str, Any]]) -> str:
    """Return a sentence about the samples that the ranks drew from replay buffers."""
    batch_count = sum(one["batches"] for one in replay)
    wait_s = sum(one["wait_s"] for one in replay)
    added = statistics.fmean(one["mean_reward_added"] for one in replay)
    drawn = [one["mean_reward_drawn"] for one in replay if one["batches"]]
    rewards = f", of mean reward {statistics.fmean(drawn):.3f} where they had found {added:.3f}" if drawn else ""
    return f"They drew {batch_count} batches from replay buffers{rewards}, and waited {wait_s:.2f} s for them in all."


def chart_title(result: dict[str, Any]) -> str:
    """Return the chart's title: one line, or two if there are replay buffers."""
    ranks, count = result["ranks"] + len(result["killed"]), sum(result["replacements"])
    buffers = len(result["buffers"])
    who = f"{'1 rank trains' if ranks == 1 else f'{ranks} ranks train'} a GFlowNet on an 8 x 8 x 8 x 8 grid"
    who += f"\nwith {'a replay buffer' if buffers == 1 else f'{buffers} replay buffers'}" if buffers else ""
    if result["policy"] == "none" or ranks == 1:
        return f"{who}, each for itself"
    if result["policy"] == "diloco":
        return f"{who}; an outer optimizer applies the mean of their changes, {result['rounds']} times"
    if result["policy"] == "selective-diloco":
        return f"{who}; an outer optimizer applies the changes that help, {result['rounds']} times"
    if result["policy"] == "async-diloco":
        return f"{who}; an outer optimizer applies each rank's change when it arrives"
    if result["policy"] == "evolution-strategy":
        return f"{who} without gradients; only losses travel, {result['rounds']} times"
    if result["policy"] in SIMPLE:
        return f"{who}; {result['policy'].replace('-', ' ')}, {result['rounds']} times"
    if result["policy"] == "population-training":
        return f"{who}; the worst copies one of the best, with a changed learning rate, {count} times"
    if result["policy"] == "average-all":
        return f"{who}; all of them wait for the average of all, {result['rounds']} times"
    return f"{who}; the worst takes the average of the others, {count} times"


def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    """End in an orderly way on SIGTERM, as on Ctrl-C."""
    raise SystemExit(128 + number)


def main() -> int:
    """Run the demo; returns the exit code."""
    options = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 110)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        run(options, console)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except VerificationError as error:
        print(f"demo: verification failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: stopped; all ranks have ended", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
