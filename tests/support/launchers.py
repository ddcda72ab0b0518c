"""Variables by which each launcher identifies a rank, here the third of four."""

from __future__ import annotations

OPENMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "2"}
BY_HAND = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
#: Second of two tasks of submitit's local executor.
SUBMITIT = {
    "SUBMITIT_EXECUTOR": "local",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_LOCALID": "1",
}
TORCHRUN = BY_HAND | {"TORCHELASTIC_RUN_ID": "none"}
