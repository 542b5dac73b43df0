"""Optimisers with their parameter groups, unscaling and clipping of gradients, optimiser state by name."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.config.sections import Optimizer
from shoal.errors import ShoalError
from shoal.runtime.device import bf16_is_native
from shoal.runtime.mesh import local, local_gradient


class Optimiser:
    """One or two torch optimisers that share the parameters of a model and take their steps together."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self._parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All groups of parameters."""
        return [group for part in self._parts for group in part.param_groups]

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the tensors that go with a parameter; none before the first step."""
        states = (part.state[parameter] for part in self._parts if parameter in part.state)
        return {key: value for state in states for key, value in state.items() if isinstance(value, Tensor)}

    def step(self, rate: float) -> None:
        """Take a step at a learning rate."""
        for group in self.param_groups:
            group["lr"] = rate
        for part in self._parts:
            part.step()


class LocalAdamW(torch.optim.AdamW):
    """torch's AdamW, computed on what this rank holds of each tensor; the state is cut like the weights.

    An update is of each element by itself. DTensor would look for the layout of hundreds of tensors together,
    which takes longer than the update of a small model.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return has_complex


class WholeMuon(torch.optim.Muon):
    """torch's Muon with its Newton-Schulz iterations in fp32, for processors without bf16 units.

    There, products in bf16 take some 50 times as long. Takes `adjust_lr_fn="match_rms_adamw"`.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step; `closure` is not used."""
        for group in self.param_groups:
            a, b, c = group["ns_coefficients"]
            for weight in (p for p in group["params"] if p.grad is not None):
                state, grad = self.state[weight], weight.grad
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(grad)
                update = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
                if group["nesterov"]:
                    update = grad.lerp(update, group["momentum"])
                wide = update.T if update.size(0) > update.size(1) else update
                wide = wide / wide.norm().clamp(min=group["eps"])
                for _ in range(group["ns_steps"]):
                    gram = wide @ wide.T
                    wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                rate = 0.2 * group["lr"] * max(weight.shape) ** 0.5
                weight.sub_(wide.T if update.size(0) > update.size(1) else wide, alpha=rate)


def build_optimiser(named: dict[str, nn.Parameter], config: Optimizer) -> Optimiser:
    """Make the optimiser of the configuration; matrices and embeddings decay, biases and norms do not.

    Muon (K. Jordan and others, 2024; torch's own) takes the matrices of the blocks, at AdamW's step size
    (Moonshot's rule: 0.2 sqrt(max(rows, columns))); embeddings, head, biases and norms stay with AdamW.
    """
    matrices = {name for name, p in named.items() if p.ndim == 2 and name.startswith("blocks.")}
    muon = matrices if config.name == "muon" else set()
    rest = [p for name, p in named.items() if name not in muon]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    if config.name == "sgd":
        fused = not any(isinstance(p, DTensor) for p in named.values())  # torch has no such kernel for them
        return Optimiser([torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)])
    betas = (config.beta1, config.beta2)
    parts: list[torch.optim.Optimizer] = [
        LocalAdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)
    ]
    if muon:
        kind = torch.optim.Muon if bf16_is_native(next(iter(named.values())).device) else WholeMuon
        parts.append(
            kind(
                [named[name] for name in sorted(muon)],
                lr=config.lr,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return Optimiser(parts)


class Model(Protocol):
    """What unscaling and clipping ask of a model in any layout."""

    def updated_weights(self) -> dict[str, nn.Parameter]: ...


def unscale_gradients(model: Model, scale: float) -> None:
    """Divide gradients by the loss scale.

    ShoalError if a parameter has no gradient: some layouts of torch lose them without a word.
    """
    weights = model.updated_weights()
    lost = sorted(name for name, weight in weights.items() if weight.grad is None)
    if lost:
        raise ShoalError(
            f"{len(lost)} of {len(weights)} parameters got no gradient, {lost[0]} the first of them",
            hint="this layout loses gradients with this version of torch; use another one and report it",
        )
    if weights and scale != 1.0:
        torch._foreach_div_([local_gradient(weight) for weight in weights.values()], scale)


def clip_gradients(model: Model, norm: float | Tensor, limit: float) -> None:
    """Clip gradients of a global norm to at most `limit` (0: leave them); a norm on a device is not read."""
    weights = model.updated_weights()
    if not weights or not limit or (not isinstance(norm, Tensor) and norm <= limit):
        return
    gradients = [local_gradient(weight) for weight in weights.values()]
    factor = limit / (norm + 1e-6)
    if isinstance(norm, Tensor):  # in the gradients' format, or they would be multiplied one by one
        factor = torch.where(norm <= limit, torch.ones_like(norm), factor).to(gradients[0])
    torch._foreach_mul_(gradients, factor)


def optimiser_tensors(named: dict[str, nn.Parameter], optimiser: Optimiser) -> dict[str, Tensor]:
    """Return the optimiser's state as {parameter name.key: tensor}, making it where it is not yet there."""
    if not any(optimiser.state_of(p) for p in named.values()):
        _make_state(list(named.values()), optimiser)
    return {
        f"{name}.{key}": value for name, p in named.items() for key, value in optimiser.state_of(p).items()
    }


def _make_state(parameters: list[nn.Parameter], optimiser: Optimiser) -> None:
    """Take a step of rate 0 on zero gradients, without decay, and do not count it.

    torch makes the state lazily and offers no other way. One parameter after the other, and those alike with
    one gradient: a rank that loads a checkpoint need not have as many as it has parameters, and what is freed
    between what stays would be lost, because aligned memory does not fit into a gap of its own size. The
    gradients of a step that was left out, which may not be finite, take no part.
    """
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    decays = [group["weight_decay"] for group in optimiser.param_groups]
    for group in optimiser.param_groups:
        group["weight_decay"] = 0.0  # momentum would begin with it
    zeros: dict[Any, Tensor] = {}
    for parameter in parameters:
        kind = parameter.shape, getattr(parameter, "placements", ())
        if kind not in zeros:
            zeros[kind] = torch.zeros_like(parameter)
        parameter.grad = zeros[kind]
        optimiser.step(0.0)
        parameter.grad = None
        if (count := optimiser.state_of(parameter).get("step")) is not None:
            count.zero_()
    for group, decay in zip(optimiser.param_groups, decays, strict=True):
        group["weight_decay"] = decay
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
