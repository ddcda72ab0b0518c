"""Tests that an optimizer's state is reset in place to the state after construction."""

from typing import Any

import torch
from torch import Tensor, nn

from asyncdist.tensors.optimizers.reset import reset_optimizer_state


def test_reset_restores_the_state_that_the_constructor_makes() -> None:
    """Adagrad's step asked for it in older releases of torch, and raised KeyError: 'sum' after a reset."""

    class Older(torch.optim.Adagrad):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            assert all("sum" in self.state[parameter] for group in self.param_groups for parameter in group["params"])
            super().step(closure)

    def trained(resets: int) -> Tensor:
        model = nn.Linear(2, 3)
        nn.init.ones_(model.weight)
        optimizer = Older(model.parameters(), lr=0.5, initial_accumulator_value=0.25)
        for _ in range(resets):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            reset_optimizer_state(optimizer)
            nn.init.ones_(model.weight)
            optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model.weight.detach()

    assert torch.equal(trained(2), trained(0))
