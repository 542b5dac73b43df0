"""PyTorch modules of described networks.

Tensor names: n samples, c channels, h height, w width, t steps, d features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shoal.errors import ConfigError
from shoal.models.part import Part
from shoal.networks.description import Layer, Resolved

_EMBEDDING_STD = 0.02  # GPT-2's


class Network(Part):
    """A described network, replicated whole; `synchronised` are the statistics of batch normalisation."""

    def __init__(self, resolved: Resolved, *, synchronised: bool = False) -> None:
        super().__init__()
        self.resolved = resolved
        self._order: list[str] = []
        self._stds: dict[str, float] = {}
        for layer in resolved.layers:
            _put(self, layer.path, _make(layer))
            self._order.append(layer.path)
            self._note_stds(layer, self.get_submodule(layer.path), layer.path)
        for norm in self._norms().values():
            norm.synchronised = synchronised

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [samples, classes], or [samples, steps, classes] of token ids [samples, steps]."""
        x = inputs if self.resolved.is_tokens else inputs.reshape(len(inputs), *self.resolved.input)
        for name in self._order:
            x = self.get_submodule(name)(x)
        return x

    def initial_std(self, name: str) -> float:
        """Return the standard deviation of a weight's initial values.

        Matrices: Glorot and Bengio, 2010, times the layer's gain; convolutions: He and others, 2015.
        """
        return self._stds[name]

    def running_statistics(self) -> dict[str, Tensor]:
        """Return the running means and variances of batch normalisation."""
        norms = self._norms()
        means = {f"{name}.running_mean": norm.running_mean for name, norm in norms.items()}
        return means | {f"{name}.running_var": norm.running_var for name, norm in norms.items()}

    def smallest_call(self, device: torch.device) -> dict[str, Tensor]:
        """Return arguments of a small forward pass: a token, or two samples, as normalisation needs two."""
        if self.resolved.is_tokens:
            return {"inputs": torch.zeros(1, 1, dtype=torch.long, device=device)}
        return {"inputs": torch.zeros(2, *self.resolved.input, device=device)}

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Network:
        """Move to a device with weights that are not set yet, and running statistics as before training."""
        super().to_empty(device=device, recurse=recurse)
        for norm in self._norms().values():
            norm.begin(device)
        return self

    @property
    def flops_per_target(self) -> int:
        """Operations for a target, forward and backward: 6 for each multiply-add of the forward pass."""
        return 6 * self.resolved.multiply_adds // self.resolved.targets

    def _norms(self) -> dict[str, _BatchNorm]:
        return {name: module for name, module in self.named_modules() if isinstance(module, _BatchNorm)}

    def _note_stds(self, layer: Layer, module: nn.Module, path: str) -> None:
        for parts, inner in ((layer.body, "body"), (layer.shortcut, "shortcut")):
            for number, part in enumerate(parts):
                self._note_stds(part, module.get_submodule(f"{inner}.{number}"), f"{path}.{inner}.{number}")
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim > 1:
                self._stds[f"{path}.{name}"] = _std(layer, weight)


def _std(layer: Layer, weight: Tensor) -> float:
    if layer.kind == "embedding":
        return _EMBEDDING_STD
    if layer.kind == "conv":
        return math.sqrt(2 / weight[0].numel())
    return float(layer.settings.get("gain", 1.0)) * math.sqrt(2 / sum(weight.shape))


def _put(module: nn.Module, path: str, child: nn.Module) -> None:
    """Register a child under a name with dots; a ConfigError for one that modules have for something else."""
    *outer, name = path.split(".")
    for part in outer:
        if part not in dict(module.named_children()):
            _put(module, part, nn.Module())
        module = module.get_submodule(part)
    if hasattr(module, name):
        raise ConfigError(f"a layer cannot have the name {path}", hint="choose another name")
    module.add_module(name, child)


def _make(layer: Layer) -> nn.Module:
    s, channels = layer.settings, layer.before[0]
    match layer.kind:
        case "linear":
            return nn.Linear(layer.before[-1], layer.after[-1], bias=s["bias"])
        case "conv":
            window = (s["kernel"], s["stride"], s["padding"])
            return nn.Conv2d(channels, layer.after[0], *window, bias=s["bias"])
        case "batch_norm":
            return _BatchNorm(channels, s["eps"], s["momentum"])
        case "max_pool":
            return nn.MaxPool2d(s["kernel"], s["stride"], s["padding"], ceil_mode=s["ceil"])
        case "avg_pool":
            return nn.AvgPool2d(
                s["kernel"], s["stride"], s["padding"], ceil_mode=s["ceil"], count_include_pad=False
            )
        case "global_avg_pool":
            return _GlobalAverage()
        case "flatten":
            return nn.Flatten()
        case "relu":
            return nn.ReLU()
        case "sigmoid":
            return nn.Sigmoid()
        case "embedding":
            return nn.Embedding(s["ids"], s["out"])
        case "lstm":
            return _Lstm(layer.before[-1], s["out"], s["layers"], batch_first=True)
        case "subsample":
            return _Subsample(s["out"], s["stride"])
    assert layer.kind == "residual", layer.kind
    return _Residual(layer.body, layer.shortcut)


class _BatchNorm(nn.Module):
    """Normalises each channel by the samples at hand, and in evaluation by running statistics.

    These are no buffers, which data parallelism would copy from the first replica to all in each step. With
    `synchronised`, the samples are those of all replicas, which must have equally many: a collective over the
    world in each forward and backward pass.
    """

    synchronised = False

    def __init__(self, channels: int, eps: float, momentum: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self._eps, self._momentum = eps, momentum
        self.begin(None)

    def begin(self, device: torch.device | str | int | None) -> None:
        """Set the running statistics as before training."""
        self.running_mean = torch.zeros(len(self.weight), device=device)
        self.running_var = torch.ones(len(self.weight), device=device)

    def forward(self, x_nchw: Tensor) -> Tensor:
        if self.synchronised and self.training and dist.is_initialized() and dist.get_world_size() > 1:
            return self._over_replicas(x_nchw.to(self.weight.dtype)).to(x_nchw.dtype)
        own = (self.running_mean, self.running_var, self.weight, self.bias)
        return functional.batch_norm(x_nchw, *own, self.training, self._momentum, self._eps)

    def _over_replicas(self, x_nchw: Tensor) -> Tensor:
        """Normalise by the mean and variance over the samples of all replicas."""
        moments = torch.stack(torch.var_mean(x_nchw, (0, 2, 3), correction=0))
        vars_rc, means_rc = _Gathered.apply(moments).unbind(1)  # r replicas
        mean = means_rc.mean(0)
        var = (vars_rc + (means_rc - mean) ** 2).mean(0)
        with torch.no_grad():
            count = len(means_rc) * x_nchw[:, 0].numel()
            self.running_mean.lerp_(mean, self._momentum)
            self.running_var.lerp_(var * (count / (count - 1)), self._momentum)
        scale = self.weight * (var + self._eps).rsqrt()
        return torch.addcmul(self.bias[:, None, None], x_nchw - mean[:, None, None], scale[:, None, None])


class _Gathered(torch.autograd.Function):
    """Stacks a tensor of all replicas. All compute with it: its gradient is summed over them."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:  # type: ignore[override]
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own.contiguous())
        return torch.stack(found)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        whole = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole)
        return whole[dist.get_rank()]


class _Residual(nn.Module):
    """Adds the output of the body to the input, or to that of the shortcut."""

    def __init__(self, body: Sequence[Layer], shortcut: Sequence[Layer]) -> None:
        super().__init__()
        self.body = nn.Sequential(*map(_make, body))
        self.shortcut = nn.Sequential(*map(_make, shortcut))  # without layers, the identity

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.shortcut(x)


class _Subsample(nn.Module):
    """Takes every `stride`-th pixel; new channels are zero (He and others, 2015, shortcut A)."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self._channels, self._stride = channels, stride

    def forward(self, x_nchw: Tensor) -> Tensor:
        x_nchw = x_nchw[:, :, :: self._stride, :: self._stride]
        return functional.pad(x_nchw, (0, 0, 0, 0, 0, self._channels - x_nchw.shape[1]))


class _GlobalAverage(nn.Module):
    """Means over height and width."""

    def forward(self, x_nchw: Tensor) -> Tensor:
        return x_nchw.mean(dim=(2, 3))


class _Lstm(nn.LSTM):
    """An LSTM that returns its outputs alone; each sample begins in state 0."""

    def forward(self, x_ntd: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x_ntd)[0]
