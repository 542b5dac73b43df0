"""AdamW with its parameter groups, the gradient norm, and the optimiser's state by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shoal.config.sections import Optimizer


def build_optimiser(model: nn.Module, config: Optimizer) -> torch.optim.Optimizer:
    """Make fused AdamW; matrices and embeddings decay, biases and norms do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
    )


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale gradients to a global norm of at most `limit` (0: leave them); return the norm before."""
    parameters = list(parameters)
    missing = [p for p in parameters if p.grad is None]
    assert not missing, f"{len(missing)} of {len(parameters)} parameters have no gradient"
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if limit:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return float(norm)


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of the next step."""
    for group in optimiser.param_groups:
        group["lr"] = rate


def optimiser_tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state as {parameter name.key: tensor}, making it where it is not yet there."""
    if not optimiser.state:
        _make_state(optimiser)
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimiser.state[parameter].items()
    }


def _make_state(optimiser: torch.optim.Optimizer) -> None:
    """Take a step of rate 0 on zero gradients: torch makes the state lazily and offers no other way.

    The state then counts one step; it is only used to be overwritten by a checkpoint's.
    """
    rates = [group["lr"] for group in optimiser.param_groups]
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    set_learning_rate(optimiser, 0.0)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        group["lr"] = rate
