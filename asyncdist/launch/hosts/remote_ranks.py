"""Starts ranks of a script on several hosts with torchrun's environment variables: ``asyncdist run --hosts``.

:mod:`asyncdist.launch.supervision.supervisor` supervises them like ranks on this host.
"""

from __future__ import annotations

import argparse
import queue
from collections.abc import Mapping, Sequence

from asyncdist import environment, local_host, rank_program
from asyncdist.launch import local_ranks
from asyncdist.launch.hosts import remote_hosts
from asyncdist.launch.hosts.remote_hosts import Agent, RemoteRank
from asyncdist.launch.supervision.supervisor import Event, Supervisor, signals_as_events
from asyncdist.launchers import child_environment
from asyncdist.trust import job_secret


def run(script: str, arguments: Sequence[str], options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run ranks of a script on other hosts. Return the exit code, as :func:`asyncdist.launch.local_ranks.run` does.

    Args:
        options: Options of ``asyncdist run``. The ``hosts`` and the words of the command ``ssh`` are lists.
        environ: Environment of this process. The ranks get all variables that do not describe this host.
    """
    command = rank_program.rank_command(script, arguments)
    secret = local_ranks.given_secret(environ) or job_secret.draw()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with (
        remote_hosts.connected(options.hosts, options.ssh, script) as agents,
        signals_as_events(events),
        remote_hosts.giving_up_silent_hosts(agents),
    ):
        where = [agent for agent in agents for _ in range(agent.host.slots)]
        environments = dict(
            enumerate(build_environments(environ, agents, threads=options.threads_per_rank, secret=secret))
        )

        def start_rank(rank: int, variables: Mapping[str, str]) -> RemoteRank:
            return where[rank].start(rank, command, variables, lambda: events.put(("ended", rank)))

        return Supervisor(events, start_rank, environments).run()


def build_environments(
    environ: Mapping[str, str], agents: Sequence[Agent], *, threads: int | None, secret: str = ""
) -> list[dict[str, str]]:
    """Return the environment of each rank. If ``threads`` is None, the user's OMP_NUM_THREADS is kept."""
    size, run_id = sum(agent.host.slots for agent in agents), local_host.new_run_id()
    user = remote_hosts.travelling(environ)
    environments: list[dict[str, str]] = []
    for group, agent in enumerate(agents):
        shared = child_environment.for_ranks(user, ranks=agent.host.slots, threads=threads, cores=agent.cores)
        shared[environment.SECRET_VARIABLE] = secret
        for local_rank in range(agent.host.slots):
            own = local_ranks.rank_variables(
                len(environments),
                size,
                local_rank=local_rank,
                local_size=agent.host.slots,
                address=agents[0].host.address,
                port=agents[0].port,
                run_id=run_id,
            )
            own |= {"GROUP_RANK": str(group), "GROUP_WORLD_SIZE": str(len(agents))}
            environments.append(shared | own)
    return environments
