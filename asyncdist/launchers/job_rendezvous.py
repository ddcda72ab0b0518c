"""Reads the rendezvous of a torch job from the environment: address, port, rank, size and the job's secret."""

from __future__ import annotations

import os
from collections.abc import Mapping

from asyncdist import environment
from asyncdist.launchers import addresses, child_environment, detection, slurm
from asyncdist.launchers.variables import TORCH_NAMES, TorchRendezvous, Variables
from asyncdist.trust import job_secret
from asyncdist.trust.job_secret import JobSecret


def torch_rendezvous(environ: Mapping[str, str] = os.environ) -> TorchRendezvous:
    """Return the rendezvous that the environment variables of torchrun or srun describe.

    Raise ValueError if variables are missing, are not numbers or contradict each other. The error names all of them.
    Also raise ValueError if MASTER_ADDR cannot be resolved, or rank 0 of a Slurm step is not on that host.
    """
    why_missing, own = "", environ
    missing = [name for name in TORCH_NAMES if not environ.get(name)]
    if missing and slurm.find_step(variables := Variables(environ)) is not None:
        variables.check()
        why_missing = slurm.why_no_rank_0(environ)
        environ, missing = {**environ, **slurm.torch_variables(environ)}, []
    if missing:
        raise ValueError(
            f"the torch transport needs the variables {', '.join(TORCH_NAMES)}; not set: {', '.join(missing)}. Start "
            "with torchrun, or call torch.distributed.init_process_group first"
        )
    variables = Variables(environ)
    launch, port = detection.described_launch("torch", variables), variables.number("MASTER_PORT")
    variables.check()
    assert launch is not None and launch.expected_size is not None and port is not None
    if launch.expected_size > 1:
        addresses.check_address("MASTER_ADDR", environ["MASTER_ADDR"])
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    if environ.get(environment.RUN_VARIABLE, run_id) != run_id:  # this job was started by a rank of another job
        environ = {name: text for name, text in environ.items() if name not in environment.OF_RUN}
        variables = Variables(environ)
    is_served = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # the same comparison as in torch.distributed
    is_loopback = environ.get(environment.LOOPBACK_VARIABLE) != "0" and addresses.is_loopback(environ["MASTER_ADDR"])
    return TorchRendezvous(
        launch.rank,
        launch.expected_size,
        environ["MASTER_ADDR"],
        port,
        is_served,
        incarnation=variables.number(environment.INCARNATION_VARIABLE) or 0,
        admits_restarted=is_served and bool(environ.get(environment.INCARNATION_VARIABLE)),
        job=run_id,
        empty_count=variables.number(environment.EMPTY_VARIABLE) or 0,
        why_missing=why_missing,
        secret=secret_of_job(environ["MASTER_ADDR"], port, launch.expected_size, own),
        is_loopback=is_loopback,
    )


def given_secret(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the job's secret, if the user has set one, and unset its variable. Raise ValueError if it is not valid."""
    known = environ
    if known is None:
        child_environment.hide_secret()
        known = {**os.environ, **child_environment.hidden}
    if known.get(environment.SECRET_VARIABLE):
        return job_secret.check(known[environment.SECRET_VARIABLE], environment.SECRET_VARIABLE)
    path = known.get(environment.SECRET_FILE_VARIABLE)
    return job_secret.read(path) if path else None


def secret_of_job(address: str, port: int, size: int, environ: Mapping[str, str] = os.environ) -> JobSecret:
    """Return the secret of a job, given the address and port of its store ("" and 0 if the store has no port).

    For a job on one host, the default is derived from the secret that the user's processes share.
    """
    text = given_secret(None if environ is os.environ else environ)
    is_on_one_host = addresses.is_loopback(address) or detection.local_size(environ) == size
    if text is None and is_on_one_host and size > 1:
        text = job_secret.shared(environment.secret_directories(environ))
    return JobSecret((text or "").encode()).at_port(port)
