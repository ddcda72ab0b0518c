"""Error hints that translate the options and calls of torchft, Accelerate and hivemind to this library's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

#: Hints for the errors that are raised if another library's option is passed to a policy, by the option's name.
FOREIGN_OPTIONS: Final = {
    **dict.fromkeys(
        ("sync_every", "local_sgd_steps", "target_batch_size", "H", "inner_steps", "num_inner_steps", "local_steps"),
        "here average_every is the number of inner steps per round",
    ),
    **dict.fromkeys(
        ("fragment_sync_delay", "tau"), "here overlap_steps is the number of steps between capture and application"
    ),
    "num_fragments": "here fragments is the number of parts of the model",
    **dict.fromkeys(
        ("outer_lr", "outer_momentum"),
        "outer_optimizer=functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True) sets both",
    ),
    **dict.fromkeys(("fragment_update_alpha", "alpha"), "here mixing is the share of the rank's own weights"),
    **dict.fromkeys(
        ("should_quantize", "grad_compression", "state_averaging_compression"),
        "here wire='int8' or another codec encodes the data",
    ),
    **dict.fromkeys(("use_bucketization", "bucket_cap_mb"), "data is always sent in slices, one for each rank"),
    "enabled": "a program that trains without averages leaves the policy out",
    "verbose": "here print(policy.statistics()) and asyncdist top show the rounds",
    "params": "here model, the first argument, has the parameters",
    "scheduler": "here the training loop calls its scheduler, which counts the rank's own steps",
    "inner_optimizer": "here optimizer, the second argument, is the inner optimizer",
    "model_fragments": "here fragment_pattern lists the names of the modules of each fragment",
    **dict.fromkeys(("backup_device", "pin_memory"), "here the anchor is always in host memory"),
    **dict.fromkeys(
        ("manager", "pg", "use_async_quorum", "accelerator", "dht", "run_id"),
        "the ranks are those of group, by default all ranks of the job",
    ),
    **dict.fromkeys(
        ("state_dict", "load_state_dict"),
        "here policy.state_dict() returns the anchor and the outer optimizer's state, and "
        "asyncdist.save_population(..., policy=policy) saves them",
    ),
    **dict.fromkeys(
        ("timeout", "quorum_timeout"),
        "a round has no time limit; grace_s is the time for which it waits once a quorum of ranks has contributed",
    ),
    **dict.fromkeys(
        ("matchmaking_time", "averaging_timeout", "grace", "grace_period"),
        "here grace_s, in seconds, is the time for which a round waits once a quorum of ranks has contributed",
    ),
    **dict.fromkeys(("min_replica_size", "min_replicas", "target_group_size"), "use quorum, a number of ranks"),
    "use_local_updates": "here ranks always make local updates",
    **dict.fromkeys(
        ("delay_state_averaging", "delay_grad_averaging", "delay_optimizer_step"),
        "here overlap_steps is the number of steps for which ranks train while a mean travels",
    ),
    **dict.fromkeys(("allreduce_timeout", "next_chunk_timeout"), "a round has no time limit; lost ranks are left out"),
    "load_state_timeout": "here start_timeout_s, in seconds, is also the time in which a restarted rank joins",
    "shutdown_timeout": "here drain_timeout_s, in seconds, is the longest wait when the policy ends",
    **dict.fromkeys(("client_mode", "auxiliary"), "here each rank trains and sends its share of each round"),
    **dict.fromkeys(
        ("average_opt_statistics", "offload_optimizer", "reuse_grad_buffers"),
        "here the inner optimizer's state stays on its rank, and gradients are not used",
    ),
    "extra_tensors": "here the model's floating buffers are averaged with its parameters",
    "load_state_compression": "here a restarted rank receives the state unencoded",
    "batch_size_per_step": "here step(tokens=n) reports the size of a step, for weights='tokens'",
    "average_state_every": "here parameters and floating buffers are averaged in each round",
    **dict.fromkeys(
        ("metric", "metric_mode", "replacement_ratio", "averaging_strategy"),
        "here all ranks are averaged, whatever their metrics; SelectiveDiLoCoPolicy and AsyncSelectiveAveragingPolicy "
        "choose by metric",
    ),
    "momentum": "outer_optimizer=functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9) sets the outer momentum, and "
    "mixing sets the share of the rank's own weights",
}


def foreign_call_hint(kind: str, arguments: Sequence[Any]) -> str:
    """Return a hint that translates a call written for another library, or "" if the library is unknown.

    Args:
        kind: Name of the called policy.
        arguments: Positional arguments of the call, at least three.
    """
    second, third, *more = arguments[1:]
    is_outer = bool(more) and isinstance(more[0], torch.optim.Optimizer)
    if isinstance(second, list | tuple) or is_outer:
        return (
            "torchft's DiLoCo(manager, model_fragments, inner_optimizer, outer_optimizer, sync_every) is here "
            f"{kind}(model, inner_optimizer, outer_optimizer=FUNCTION, average_every=sync_every): model is the whole "
            "model, FUNCTION makes the outer optimizer of a list of parameters, and the ranks are those of group"
        )
    if not isinstance(second, nn.Module):
        return ""
    is_torchft = isinstance(third, torch.optim.Optimizer)
    call = (
        "torchft's LocalSGD(manager, model, optimizer, sync_every)"
        if is_torchft
        else "Accelerate's LocalSGD(accelerator, model, local_sgd_steps)"
    )
    return (
        f"{call} is here DiLoCoPolicy(model, optimizer, outer_optimizer=None, "
        f"average_every={'sync_every' if is_torchft else 'local_sgd_steps'}), and the ranks are those of group"
    )
