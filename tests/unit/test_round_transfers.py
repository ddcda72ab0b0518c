"""Tests that the memory of the first exchanged round is allocated when the policy starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from asyncdist.protocols.exchange import rounds
from asyncdist.protocols.parameter_stream.neighbours import READ_NBYTES_MIN


def transfers(nbytes: int, *, shares_memory: bool) -> rounds.RoundTransfers:
    layout = SimpleNamespace(
        vectors=(None,),
        memory_nbytes=lambda *, of_mean: nbytes * (1 + of_mean),
        encoded_in=lambda block, *, of_mean: [block],
    )
    fragment: Any = SimpleNamespace(is_frequent=True, layout=layout)
    services: Any = SimpleNamespace(shares_memory=shares_memory)
    return rounds.RoundTransfers(services, None, [fragment], is_overlapped=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nbytes", "shares_memory", "early_count"),
    [(READ_NBYTES_MIN, True, 2), (READ_NBYTES_MIN, False, 0), (READ_NBYTES_MIN // 4, True, 0)],
)
def test_first_round_allocates_no_shared_memory(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, shares_memory: bool, early_count: int
) -> None:
    made: list[int] = []
    new_block = rounds.RoundTransfers._new_block

    def counted(self: rounds.RoundTransfers, nbytes: int, *, is_kept: bool) -> Tensor:
        made.append(nbytes)
        return new_block(self, nbytes, is_kept=is_kept)

    monkeypatch.setattr(rounds.RoundTransfers, "_new_block", counted)
    tested = transfers(nbytes, shares_memory=shares_memory)
    assert made == [nbytes, 2 * nbytes][:early_count]
    for of_mean in (False, True):
        assert tested.new_encoded(0, of_mean=of_mean)[0].nbytes == nbytes * (1 + of_mean)
    assert made == [nbytes, 2 * nbytes]
