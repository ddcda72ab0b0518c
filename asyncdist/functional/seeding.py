"""Seeds, saves and restores a rank's random number generators: Python's, numpy's global one, and torch's.

The state of numpy's default global generator, an MT19937, is saved as a tuple, and the state of any other generator as
JSON. ``torch.load(weights_only=True)`` loads both.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from asyncdist import validation
from asyncdist.runtime.world import World, current_world

logger = logging.getLogger("asyncdist.population_checkpoint")

_OTHER_GENERATORS: Final = ("PCG64", "PCG64DXSM", "Philox", "SFC64")
#: Number of words in the buffer of a Philox generator.
_BUFFER_LENGTH: Final = 4


class RestoredNumbers:
    """Records whether this rank's generators are still in the states that it restored from its own checkpoint.

    An integration makes the ranks' random numbers differ, unless the ranks resume from their own checkpoints.
    """

    def __init__(self, _: object) -> None:
        self._restored: int | None = None

    def note(self) -> None:
        """Record the current states of the generators, which have just been restored."""
        self._restored = _hash_of_states()

    @property
    def are_unchanged(self) -> bool:
        """Whether no number was drawn and no seed was set since the last call of :meth:`note`."""
        return self._restored is not None and self._restored == _hash_of_states()


def _hash_of_states() -> int:
    return hash(
        (random.getstate(), _as_json(np.random.get_state(legacy=False)), torch.get_rng_state().numpy().tobytes())
    )


def seed_all(seed: int, *, world: World | None = None) -> int:
    """Seed :mod:`random`, NumPy's global generator and torch, on all devices, with a different seed on each rank.

    Shuffling and dropout then differ between ranks. For equal initial weights, call ``torch.manual_seed(seed)``, create
    the model, and call this function afterwards.

    Args:
        seed: Integer >= 0, equal on all ranks.
        world: World of the call, by default the current one.

    Returns:
        The seed of this rank's generators, derived from ``seed`` and rank with NumPy's ``SeedSequence``. Different
        ranks and adjacent values of ``seed`` give unrelated seeds.

    Raises:
        ValueError: ``seed`` is not an integer >= 0.
        RuntimeError: There is no current world.
    """
    seed = validation.count("seed", seed, least=0)
    rank = (world or current_world()).rank
    number = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    return number


def random_states() -> dict[str, Any]:
    """Return the current states, as values that torch can load."""
    return {
        "python": random.getstate(),
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore the saved random states."""
    random.setstate(states["python"])
    state = _as_numpy_state(states["numpy"])
    saved, own = state["bit_generator"], np.random.get_state(legacy=False)["bit_generator"]
    if own == saved:
        np.random.set_state(state)
    else:
        logger.warning(
            "the state of numpy's global generator is not restored, because it is a %s here and a %s in the checkpoint",
            own,
            saved,
        )
    torch.set_rng_state(states["torch"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def check_random_states(states: Mapping[str, Any]) -> None:
    """Raise an error of any type unless loaded states can be restored."""
    random.Random().setstate(states["python"])
    state = _as_numpy_state(states["numpy"])
    name = state["bit_generator"]
    if name == "MT19937":
        position, last = state["state"]["pos"], 624
    elif name in _OTHER_GENERATORS:
        position, last = state.get("buffer_pos", 0), _BUFFER_LENGTH
    else:
        raise ValueError(f"numpy's generator must be one of numpy's, got {name!r:.80}")
    if type(position) is not int or not 0 <= position <= last:  # numpy would read memory outside the state
        raise ValueError(f"the position of numpy's generator must be from 0 to {last}, got {position!r:.80}")
    np.random.RandomState(getattr(np.random, name)(0)).set_state(state)
    torch.Generator(device="cpu").set_state(states["torch"])
    if not all(isinstance(each, torch.Tensor) for each in states["cuda"]):
        raise TypeError("the saved generator states of the GPUs must be tensors")


def _numpy_state() -> tuple[str, torch.Tensor, int, int, float] | str:
    state: Any = np.random.get_state(legacy=False)
    name, inner = state["bit_generator"], state["state"]
    if name != "MT19937":
        return _as_json(state)
    words = torch.from_numpy(inner["key"].astype(np.int64))
    return name, words, int(inner["pos"]), int(state["has_gauss"]), float(state["gauss"])


def _as_json(numpy_state: Any) -> str:
    return json.dumps(numpy_state, default=np.ndarray.tolist)


def _as_numpy_state(saved: Any) -> dict[str, Any]:
    if isinstance(saved, str):
        state: dict[str, Any] = json.loads(saved)
        return state
    name, words, position, has_gauss, gauss = saved
    inner = {"key": words.numpy().astype(np.uint32), "pos": position}
    return {"bit_generator": name, "state": inner, "has_gauss": has_gauss, "gauss": gauss}
