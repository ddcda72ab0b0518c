"""Tests the wording of errors that no other single-process test raises: each names the value and the allowed ones."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from asyncdist import argument_types
from asyncdist.collectives.agreement.messages import AgreementKey
from asyncdist.errors import RemoteProtocolError
from asyncdist.functional.checkpoints import checkpoint_state
from asyncdist.functional.parallel_groups import ParallelLayout
from asyncdist.integrations.joining import selective_averaging
from asyncdist.launch import process_groups, rank_process
from asyncdist.launch.config import MultiprocessConfig
from asyncdist.simulation import Interrupt
from asyncdist.simulation.exploration import process_pool
from asyncdist.tensors import pytrees
from asyncdist.tensors.byte_views import byte_view
from protocols.parameter_stream.messages import LocateRequest, PartGrant
from protocols.replay_buffer.messages import Draw
from protocols.replay_buffer.store import dtype_of
from protocols.selective.messages import Assign, Frozen


def model() -> nn.Linear:
    return nn.Linear(2, 1)


def sgd(count: int = 1) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones(1)) for _ in range(count)], lr=0.1)


def compare(saved: dict[str, Any], trained: Any = None, **loaded: Any) -> None:
    checkpoint_state.compare(model(), trained, {"model": saved, "optimizer": None, **loaded})


def parts(**changes: Any) -> None:
    names = ("model", "optimizer", "policy", "extra", "random")
    checkpoint_state.check_parts({**dict.fromkeys(names), "model": {}, **changes})


def refused(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match="^" + words):
        call()


OTHER_MODEL = "the checkpoint must be of a model with the same layout: "
PLACE = "rank must be from 0 to 1, got 2"


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (
            lambda: argument_types.seconds("-1"),
            argparse.ArgumentTypeError,
            "must be >= 0 seconds and finite, got '-1'",
        ),
        (lambda: selective_averaging(1, "best", {}), ValueError, "mode must be 'min' .* or 'max' .*, got 'best'"),  # type: ignore[arg-type]
        (
            lambda: selective_averaging(1, None, {}, swap_every=2),
            ValueError,
            "swap_every must be None if replica_size is 1, got 2",
        ),
        (
            lambda: Interrupt(0, 1.0, "SIGKILL"),  # type: ignore[arg-type]
            ValueError,
            "signal must be 'SIGTERM' or 'SIGINT' in Interrupt, got 'SIGKILL'",
        ),
        (lambda: process_pool.unpack(b"?"), TypeError, "the scenario must be in a module that another process can"),
        (lambda: ParallelLayout(4).ranks_of(4), ValueError, "rank must be from 0 to 3, got 4"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    refused(call, kind, words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"local_world_size": 4, "world_size": 2}, "local_world_size must be <= world_size=2, got 4"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to 1 with world_size=2, got 2"),
        ({"rank": -1}, "rank must be an integer >= 0, got -1"),
        ({"rank": 0, "local_rank": 1}, "local_rank must be <= rank=0, got 1"),
        ({"master_addr": ""}, "master_addr must be the name or address of rank 0's host, got ''"),
        ({"master_port": 0}, "master_port must be a port from 1 to 65535, got 0"),
        ({"init_method": "udp://a:1"}, "init_method must be 'env://', .* or 'file://path', got 'udp://a:1'"),
        ({"backend": "ccl"}, "backend must be one of .* with torch .*, got 'ccl'"),
        ({"launch_method": "thread"}, "launch_method must be one of 'forkserver', 'spawn', got 'thread'"),
    ],
)
def test_wrong_options_of_a_launch_are_named(options: dict[str, Any], words: str) -> None:
    refused(lambda: MultiprocessConfig(**options), ValueError, words)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: process_groups.check_place(2, 0, 2, 1, 29500), ValueError, PLACE),
        (lambda: process_groups.check_place(0, 0, 2, 3, 29500), ValueError, "local_world_size must be <= world_size=2"),
        (lambda: process_groups.check_init_method(5), TypeError, "init_method must be 'env://', .*, got 5"),
        (
            lambda: rank_process.check_call("name", MultiprocessConfig()),
            TypeError,
            "func must be a function or a coroutine function, got 'name'",
        ),
        (lambda: rank_process.check_call(print, 4), TypeError, "cfg must be a MultiprocessConfig, got 4"),
    ],
)
def test_wrong_places_of_a_rank_are_named(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    refused(call, kind, words)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: compare({"weight": torch.ones(1, 2)}), f"{OTHER_MODEL}'bias' is in this model and not in the check"),
        (
            lambda: compare({**model().state_dict(), "more": torch.ones(1)}),
            f"{OTHER_MODEL}'more' is in the checkpoint and not in this model",
        ),
        (
            lambda: compare({**model().state_dict(), "bias": 3}),
            f"{OTHER_MODEL}'bias' is a Tensor in this model and a int in the checkpoint",
        ),
        (
            lambda: compare({**model().state_dict(), "bias": torch.ones(2)}),
            OTHER_MODEL + r"'bias' has the shape \(1,\) in this model and \(2,\) in the checkpoint",
        ),
        (
            lambda: compare(model().state_dict(), sgd()),
            "the checkpoint must have an optimizer's state, but it was saved",
        ),
        (
            lambda: compare(model().state_dict(), sgd(), optimizer=sgd().state_dict(), optimizer_class="Adam"),
            "the checkpoint must be of an optimizer of the class SGD, got Adam",
        ),
        (
            lambda: compare(model().state_dict(), sgd(), optimizer=sgd(2).state_dict()),
            r"the checkpoint must be of an optimizer with parameter groups of \[1\] parameters, got \[2\]",
        ),
        (lambda: checkpoint_state.check_parts({}), "the part 'model' of the saved state is missing"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(call: Callable[[], Any], words: str) -> None:
    refused(call, ValueError, words)


def test_a_checkpoint_without_a_model_is_named() -> None:
    refused(lambda: parts(model=[]), TypeError, "the part 'model' of the saved state must be a dictionary, got a list")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: PartGrant(0, 8, 8, 2, 2), "part must be from 0 to 1, got 2"),
        (lambda: LocateRequest(-1, 2, 2), "part must be from -1 to 1, got 2"),
        (lambda: LocateRequest(0), r"slot must be < 0 \(slots >= 0 belong to streams\), got 0"),
        (lambda: Draw(0, 0, 0.0, True), "count must be >= 1, got 0"),
        (lambda: Assign("leader", (0,), (1,), 0, 0), "role must be 'donor' or 'replacer', got 'leader'"),
        (lambda: Assign("donor", (1, 0), (2,), 0, 0), r"the donors must be in ascending order, got \(1, 0\)"),
        (lambda: Frozen((0,), (), (1,), 0, 1.0), "donors, weights and iterations must be of equal length, got"),
        (lambda: Frozen((0,), (-1.0,), (1,), 0, 1.0), r"weights must be finite and >= 0, got \(-1.0,\)"),
        (lambda: Frozen((0,), (1.0,), (1,), 0, -1.0), "timeout_s must be >= 0, got -1.0"),
        (lambda: dtype_of("text"), "the dtype must be a dtype of torch, got 'text'"),
        (lambda: pytrees.lines_from_text("?"), re.escape("the text must be the JSON of a tree, got '?'")),
        (lambda: pytrees.lines_from_text('[["a", "b"], ["a", "c"]]'), "each path of a tree must occur once, got "),
        (
            lambda: byte_view(torch.ones(2, device="meta")),
            "a tensor to send must be in CPU memory, got a tensor on meta",
        ),
    ],
)
def test_values_that_no_rank_sends_are_named(call: Callable[[], Any], words: str) -> None:
    refused(call, ValueError, words)


def test_a_name_that_is_no_agreement_is_named() -> None:
    words = "the name of an agreement must have the form 'SUBJECT on ranks RANKS', got 'start'"
    refused(lambda: AgreementKey.parse("start"), RemoteProtocolError, words)
