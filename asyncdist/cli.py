"""The ``asyncdist`` command: parses arguments and calls the subcommands.

Invalid input prints one line on standard error and exits with code 2. Each command's modules are imported only when the
command runs, so that ``asyncdist --help`` imports little more than argparse.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from asyncdist import local_host, rank_program
from asyncdist._version import __version__
from asyncdist.argument_types import count, folder, port, seconds, split_words, whole
from asyncdist.launch import run_command
from asyncdist.planning import arguments as plan_arguments
from asyncdist.report import commands as report

_SIM_OPTIONS: Final = ("-n", "--ranks", "--seed", "--faults", "--explore", "--processes", "--until-s", "--record")
_REPLAY_OPTIONS: Final = ("--job", "--rank", "--to-test")
#: Commands that need no working directory, or report themselves that it has been deleted.
_ANYWHERE: Final = ("doctor", "plan", "story", "top")
#: Scripts that ``asyncdist init`` writes.
_STARTERS: Final = ("plain", "lightning", "transformers", "protocol")
#: Names of Python interpreters.
_INTERPRETER: Final = re.compile(r"python[\d.]*")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of all commands. The arguments of ``run`` are added only if ``command`` is ``run``."""
    parser = _Parser(
        prog="asyncdist", description="Awaitable message passing for distributed PyTorch training.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"asyncdist {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    add = functools.partial(commands.add_parser, allow_abbrev=False)
    run_command.add_to(add, has_arguments=command == "run")
    _add_sim(add)
    _add_replay(add)
    report.add_to(add)
    plan_arguments.add_to(add)
    add(
        "doctor",
        help="show the detected set-up, problems, and how to fix them",
        description=(
            "Show the detected launcher, transport and libraries, problems, and how to fix them. The command also runs "
            "under a launcher, as in mpirun -n 2 asyncdist doctor. The exit code is 0 if there are no problems, else 1."
        ),
    )
    top = add(
        "top",
        help="show what the ranks of a running job are doing, in a table that refreshes",
        description=(
            "Show what each rank of a running job on this host is doing, in a table that refreshes: steps and their "
            "rate, metric, round and role, replacements, bytes, waits, losses. The ranks are not disturbed."
        ),
    )
    top.add_argument("job", nargs="?", metavar="JOB|PID", help="the job to show, if this user runs several")
    top.add_argument("--web", action="store_true", help="show the job on a page in the browser, served at 127.0.0.1")
    top.add_argument("--port", type=port, metavar="PORT", help="the port of the page (default: a free port)")
    story = add(
        "story",
        help="show what the ranks of a running job wait for, and at which line of the program",
        description=(
            "Show what each rank of a running job on this host waits for, for which ranks, since when and at which "
            "line of the program. The ranks are not disturbed. kill -USR1 PID makes one rank print this report. For "
            "a recorded job (--record DIR), show the last actions of each rank."
        ),
    )
    story.add_argument(
        "job",
        nargs="?",
        metavar="JOB|PID|DIR",
        help="the job to show, if this user runs several; or the folder of a recording",
    )
    story.add_argument(
        "--job", dest="recorded", metavar="JOB", help="the job to show, if the folder has recordings of several"
    )
    init = add(
        "init",
        help="write an example script",
        description="Write a commented example script that is ready to run.",
    )
    init.add_argument(
        "flavour", choices=_STARTERS, help="the trainer of the script, or protocol for messages of your own"
    )
    init.add_argument(
        "path", nargs="?", default="train.py", help="the file to write, which must not exist yet (default: train.py)"
    )
    return parser


def _add_sim(add: Callable[..., argparse.ArgumentParser]) -> None:
    sim = add(
        "sim",
        help="run a script on simulated ranks, in virtual time; a seed determines all interleavings",
        usage=(
            "asyncdist sim script.py --ranks RANKS [--seed SEED] [--faults FILE] [--until-s SECONDS]\n"
            "                     [--record DIR] [--explore COUNT [--processes P]] [arguments]"
        ),
        description="Run a script on simulated ranks in this process; asyncdist.run then calls asyncdist.simulate.",
        epilog="Arguments after --, or from the first argument that is not an option of this command, are passed to "
        "the script.",
    )
    sim.add_argument("script", help="a Python script that calls asyncdist.run once")
    sim.add_argument("-n", "--ranks", type=count, metavar="RANKS", help="the number of ranks to simulate")
    sim.add_argument("--seed", type=whole, default=0, help="the seed of all random choices (default: 0)")
    sim.add_argument(
        "--faults", metavar="FILE", help='a JSON list of faults, as in [{"kind": "Kill", "rank": 1, "at_s": 0.5}]'
    )
    sim.add_argument(
        "--until-s",
        type=seconds,
        metavar="SECONDS",
        help="limit of virtual time: a run that reaches it fails and shows the wait of each rank (default: none)",
    )
    sim.add_argument(
        "--record",
        type=folder,
        metavar="DIR",
        help="write a recording for asyncdist report into this folder; with --explore, record only the failing seed",
    )
    sim.add_argument("--explore", type=count, metavar="COUNT", help="run COUNT seeds, from --seed on, until one fails")
    sim.add_argument(
        "--processes", type=count, metavar="P", help="the number of exploring processes (default: one for each core)"
    )


def _add_replay(add: Callable[..., argparse.ArgumentParser]) -> None:
    replay = add(
        "replay",
        help="repeat a recorded job in the simulator, with the recorded messages",
        usage="asyncdist replay DIR [--job JOB] [--rank RANK --pdb | --to-test FILE] [script.py [arguments]]",
        description="Replay a recorded job on simulated ranks, with the same decisions and the same weights.",
        epilog="Without a script, the recorded script and its arguments are used.",
    )
    replay.add_argument("folder", metavar="DIR", help="the folder that was passed to --record")
    replay.add_argument("--job", help="the job, if the folder has recordings of several")
    replay.add_argument("--rank", type=whole, help="the rank that --pdb debugs (default: 0)")
    replay.add_argument("--pdb", action="store_true", help="stop in a debugger, on the first line of the rank's main")
    replay.add_argument("--to-test", metavar="FILE", help="write a pytest file that replays a copy of the recording")
    replay.add_argument("script", nargs="?", help="the script that was recorded")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line (by default ``sys.argv[1:]``), and exit."""
    local_host.open_standard_files()
    words = list(sys.argv[1:] if arguments is None else arguments)
    own: list[str] = []
    rest: list[str] = []
    is_ended = False  # whether "--" precedes the words of the script of asyncdist sim
    if words[:1] == ["run"]:
        own, rest = run_command.split(words[1:])
        words = ["run", *own]
    elif words[:1] == ["sim"]:
        own, rest = split_words(words[1:], _SIM_OPTIONS)
        is_ended = "--" in words[: len(words) - len(rest)]
        words = ["sim", *own]
    elif words[:1] == ["replay"]:
        own, rest = split_words(words[1:], _REPLAY_OPTIONS, ("--pdb",), names=2)
        words = ["replay", *own]
    if not words:
        _Parser(prog="asyncdist").error("a command is missing; asyncdist --help lists the commands")
    _check_names(words)
    options, unknown = _parser(words[0]).parse_known_args(words)
    if unknown:  # argparse's error would not name the subcommand
        _Parser(prog=f"asyncdist {options.command}").error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command not in _ANYWHERE and not local_host.has_working_directory():
        deleted = "the working directory has been deleted: cd to an existing directory"
        _Parser(prog=f"asyncdist {options.command}").error(deleted)
    if options.command in ("run", "sim") and options.script is not None:
        _check_interpreter(options.command, options.script, own, rest)
    if options.command in ("sim", "replay") and arguments is None:  # this process can be restarted with sys.argv
        from asyncdist import environment

        environment.fix_hash_seed()
    if options.command == "sim" and not is_ended:  # after the restart, which would print the note again
        _report_similar_option(rest)
    from asyncdist.launchers import launcher_signals

    with launcher_signals.heeding_children():
        try:
            if options.command == "run" and options.live:
                from asyncdist.launch import live_table  # imported only here, because it loads msgspec

                sys.exit(live_table.run([*(word for word in own if word != "--live"), *rest]))
            sys.exit(_main(options, rest))
        except KeyboardInterrupt as interrupt:
            if options.command != "run":  # whose ranks report the interruption
                what = interrupt.args[0] if interrupt.args else "interrupted"
                print(f"asyncdist {options.command}: {what}", file=sys.stderr)
            sys.exit(130)


def _report_similar_option(rest: Sequence[str]) -> None:
    """Print a note if the script's first word resembles an option of ``asyncdist sim``."""
    import difflib

    option = rest[0].partition("=")[0] if rest else ""
    near = difflib.get_close_matches(option, _SIM_OPTIONS, n=1, cutoff=0.85) if option.startswith("--") else []
    if near:
        note = f"{option} is passed to the script; did you mean {near[0]}? If not, write -- before {option}"
        print(f"asyncdist sim: {note}", file=sys.stderr)


def _check_names(words: Sequence[str]) -> None:
    """Exit with an error if the command or an option is unknown. The error suggests the most similar name."""
    if not words or words[0].startswith("-"):
        return
    name = words[0]
    commands = next(action.choices for action in _parser(name)._actions if isinstance(action.choices, Mapping))
    if name not in commands:
        from asyncdist import validation

        _Parser(prog="asyncdist").error(f"there is no command {name!r}; {validation.meant(name, list(commands))}")
    known = commands[name]._option_string_actions
    for word in itertools.takewhile(lambda word: word != "--", words[1:]):
        option = word.partition("=")[0]
        if option.startswith("--") and option not in known:
            from asyncdist import validation

            cure = validation.meant(option, list(known), f"asyncdist {name} --help lists the options")
            _Parser(prog=f"asyncdist {name}").error(f"there is no option {option}; {cure}")
        if option.startswith("-np") and name in ("run", "sim"):  # argparse would read it as -n p
            cure = f"write -n RANKS, as in asyncdist {name} -n 2 script.py"
            _Parser(prog=f"asyncdist {name}").error(f"there is no option -np; {cure}")


def _check_interpreter(command: str, script: str, own: Sequence[str], rest: Sequence[str]) -> None:
    """Exit with an error if ``script`` is a Python interpreter, as in ``asyncdist run -n 2 python script.py``.

    Args:
        own: Words of the command and the script's name.
        rest: Words after the script's name.
    """
    if not _INTERPRETER.fullmatch(os.path.basename(script)):
        return
    if os.path.isfile(script) and rank_program.find_syntax_error(script) is None:  # a Python script of this name
        return
    options = [word for word in own if word != script]
    program = list(itertools.dropwhile(lambda word: word == "-u", rest))
    # The first word may be an option of Python without an equivalent here, such as -c.
    if not program or (program[0].startswith("-") and not program[0].startswith("-m")):
        program = ["script.py"]
    right = shlex.join(["asyncdist", command, *options, *program])
    _Parser(prog=f"asyncdist {command}").error(f"omit {script!r}, which asyncdist {command} starts: {right}")


def _main(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if options.command == "sim":
        return _sim(options, rest)
    if options.command == "replay":
        return _replay(options, rest)
    if options.command in ("report", "trace", "export", "query"):
        return report.run(options)
    if options.command == "plan":
        from asyncdist.planning import command as plan

        return plan.run(options)
    if options.command == "init":
        return _init(options.flavour, Path(options.path))
    if options.command == "top":
        return _top(options)
    if options.command == "story":
        from asyncdist.story import command  # imported only here, because it loads msgspec

        return command.run(options.job, options.recorded)
    if options.command == "doctor":
        from asyncdist.launch import doctor  # imported only here, because it loads torch

        return doctor.run()
    try:
        return run_command.run(options, rest)
    except local_host.LaunchError as error:
        print(f"asyncdist {options.command}: {error}", file=sys.stderr)
        return 2


def _top(options: argparse.Namespace) -> int:
    if options.web:
        from asyncdist.report.live_page import server  # imported only here, because it loads numpy

        return server.run(options.job, options.port or 0)
    if options.port is not None:
        _Parser(prog="asyncdist top").error("--port is the port of the page; add --web")
    from asyncdist.live import top  # imported only here, because it loads msgspec

    return top.run(options.job)


def _init(flavour: str, path: Path) -> int:
    from importlib import resources

    text = resources.files("asyncdist.starters").joinpath(f"{flavour}.py").read_text(encoding="utf-8")
    if path.stem in re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE):
        hidden = "the file must not be named like a module that the script imports; choose another name"
        print(f"asyncdist init: {str(path)!r}: {hidden}", file=sys.stderr)
        return 2
    for name in ("train.py", "gossip.py"):  # names in the example commands of the scripts' docstrings
        text = text.replace(f" {name} ", f" {path} ").replace(f" {name}\n", f" {path}\n")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        why = "the file already exists; choose another name" if isinstance(error, FileExistsError) else error.strerror
        print(f"asyncdist init: {str(path)!r}: {why}", file=sys.stderr)
        return 2
    print(f"wrote {path}; start it with: asyncdist {'sim' if flavour == 'protocol' else 'run'} -n 4 {path}")
    return 0


def _replay(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from asyncdist.simulation.replay import script as scripts  # imported only here, because it loads torch

    wrong = "--rank needs --pdb" if options.rank is not None and not options.pdb else ""
    if options.pdb and options.to_test is not None:
        wrong = "--pdb and --to-test exclude each other: --to-test writes a test and replays nothing"
    if wrong:
        print(f"asyncdist replay: {wrong}", file=sys.stderr)
        return 2
    rank = (options.rank or 0) if options.pdb else None
    return scripts.run_command(
        options.folder, options.script, arguments, job=options.job, rank=rank, to_test=options.to_test
    )


def _sim(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from asyncdist.simulation import run_script as scripts  # imported only here, because it loads torch
    from asyncdist.simulation.exploration.repro_command import ScriptError, read_faults

    try:
        if options.ranks is None:
            raise ScriptError(run_command.ranks_missing("sim", options.script, arguments))
        if options.processes is not None and options.explore is None:
            raise ScriptError("--processes needs --explore")
        local_host.check_script(options.script)
        faults = () if options.faults is None else read_faults(options.faults, options.ranks)
        record = None if options.record is None else os.path.abspath(options.record)
        script = scripts.Script(options.script, tuple(arguments), options.ranks, faults, options.until_s, record)
        if options.explore is None:
            return scripts.run_once(script, options.seed)
        return scripts.run_many(script, range(options.seed, options.seed + options.explore), options.processes)
    except (ScriptError, local_host.LaunchError) as error:
        print(f"asyncdist sim: {error}", file=sys.stderr)
        return 2
