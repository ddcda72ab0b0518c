"""Resets the state of an optimizer, for a rank that replaced its weights and keeps its optimizer.

Moments and step counts describe the weights that were replaced, so they start again.
"""

import torch


def reset_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Clear moments and step counts in place; parameter groups and hyperparameters stay, and so does the object."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        optimizer.state.clear()
        return
    for group in optimizer.param_groups:  # its constructor makes the state, and up to torch 2.12 its step needs it
        start = group["initial_accumulator_value"]
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state["step"] = torch.zeros_like(state["step"])
            state["sum"] = torch.full_like(state["sum"], complex(start, start) if parameter.is_complex() else start)
