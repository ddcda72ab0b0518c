"""Functions behind ``data/jax_table.json``, which use only operators, so that both JAX and torch run them."""

from __future__ import annotations

from typing import Any


def square_error(params: Any, x: Any, y: Any) -> Any:
    error = x @ params["weight"] + params["bias"][0] - y
    return (error * error).sum() / 8


def scaled_error(params: Any, x: Any, y: Any) -> Any:
    """Return an error that is not a sum of products, so that every rounding is elementwise."""
    return ((params["weight"] * x + y) * params["bias"]).sum()


def score(member: Any, scale: Any) -> Any:
    """Score one member of a population: return a tree for a tree."""
    return {"score": member["x"] * scale, "twice": member["n"] + member["n"]}


def pair(member: Any, scale: Any) -> Any:
    return member["x"] / scale, member["n"] * 3


LOSSES = {"square_error": square_error, "scaled_error": scaled_error}
ON_MEMBERS = {"score": score, "pair": pair}
