"""What ranks between processes say of their waits."""

from __future__ import annotations

import pytest
from support import torchrun

STANDS = """
    import asyncio, os, signal, torch
    import asyncdist as ad

    async def main(world):
        if world.rank == 0:
            await ad.barrier()
        elif world.rank == 1:
            await asyncio.Event().wait()
        group = await ad.new_group([2, 3])
        if world.rank == 2:
            asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGINT)
            await world.receive_stream(torch.zeros(4), 3)
        world.spawn(asyncio.Event().wait(), name="helper")

    ad.run(main)
"""


@pytest.mark.parametrize(
    ("number", "told", "said_by_2"),
    [
        ("SIGINT", "KeyboardInterrupt", "was interrupted"),
        pytest.param("SIGTERM", "SystemExit: 143 (SIGTERM)", "was terminated (SIGTERM)", marks=pytest.mark.long),
    ],
)
def test_at_a_signal_every_rank_says_what_it_was_waiting_for(number: str, told: str, said_by_2: str) -> None:
    """Also those that no signal has reached."""
    result = torchrun.run_source(4, STANDS.replace("SIGINT", number), timeout_s=60)
    assert 0 not in result.returncodes, result.output()
    said = {line.partition("asyncdist: ")[2] for line in result.stderr.splitlines() if "was waiting for" in line}
    lines = {int(line.split()[1]): line for line in said}
    assert sorted(lines) == [0, 1, 2, 3], result.output()
    for rank, what in ((0, "barrier, in main ("), (1, "Event.wait, in main ("), (3, "helper: Event.wait")):
        expected = f"rank {rank} stopped: rank 2 failed: {told}; rank {rank} was waiting for {what}"
        assert lines[rank].startswith(expected), result.output()
    assert lines[2].startswith(f"rank 2 {said_by_2}; rank 2 was waiting for "), result.output()
    assert "in main (" in lines[2]
