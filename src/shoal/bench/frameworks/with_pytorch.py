"""PyTorch, eager or (mode tuned) compiled with torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

Layer = dict[str, Any]
Batch = tuple[Tensor, Tensor]


class Adapter:
    """A plain module and torch.optim.SGD on the CPU; a process for each worker."""

    mechanism = "DistributedDataParallel over gloo"

    def __init__(self, job: dict[str, Any], weights: dict[str, Any]) -> None:
        self.workers, tuned = job["workers"], job["mode"] == "tuned"
        torch.set_num_threads(job["threads"] // self.workers)
        self.tokens = job["network"]["is_tokens"]
        self.module = nn.Sequential(*map(build, job["network"]["layers"]))
        for (name, array), parameter in zip(weights.items(), self.module.parameters(), strict=True):
            with torch.no_grad():
                assert tuple(parameter.shape) == array.shape, (name, parameter.shape, array.shape)
                parameter.copy_(torch.from_numpy(array))
        self.network: nn.Module = self.module
        if self.workers > 1:
            place = f"tcp://127.0.0.1:{job['ports'][0]}"
            distributed.init_process_group("gloo", place, rank=job["rank"], world_size=self.workers)
            self.network = DistributedDataParallel(self.module)
        self.optimiser = torch.optim.SGD(self.module.parameters(), lr=job["lr"], momentum=job["momentum"])
        self.loss = torch.compile(self._loss) if tuned else self._loss

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__, "build": torch.__config__.show()}

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    def put(self, inputs: Any, targets: Any) -> Batch:
        x, y = torch.from_numpy(inputs), torch.from_numpy(targets)
        return (x.long() if self.tokens else x), y

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.network(inputs).flatten(0, -2), targets.flatten())

    def identity(self, batch: Batch) -> tuple[float, float]:
        loss = self._backward(batch)
        norms = [weight.grad.norm() for weight in self.module.parameters() if weight.grad is not None]
        return self.read(loss), torch.stack(norms).norm().item()

    def _backward(self, batch: Batch) -> Tensor:
        self.optimiser.zero_grad(set_to_none=True)
        loss: Tensor = self.loss(*batch)
        loss.backward()
        return loss.detach()

    def step(self, batch: Batch) -> Tensor:
        loss = self._backward(batch)
        self.optimiser.step()
        return loss

    def wait(self) -> None:
        """Return at once: on a CPU, a step returns when it is computed."""

    def read(self, loss: Tensor) -> float:
        return loss.item()

    def mean(self, losses: list[float]) -> list[float]:
        total = torch.tensor(losses, dtype=torch.float64)
        distributed.all_reduce(total)
        return [loss / self.workers for loss in total.tolist()]


class Residual(nn.Module):
    def __init__(self, body: list[Layer], shortcut: list[Layer]) -> None:
        super().__init__()
        self.body, self.shortcut = nn.Sequential(*map(build, body)), nn.Sequential(*map(build, shortcut))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.shortcut(x)


class Subsample(nn.Module):
    def __init__(self, out: int, stride: int) -> None:
        super().__init__()
        self.out, self.stride = out, stride

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return nn.functional.pad(x, (0, 0, 0, 0, 0, self.out - x.shape[1]))


class LSTM(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def build(layer: Layer) -> nn.Module:
    """Return the module of one layer."""
    kind, s, before = layer["kind"], layer["settings"], layer["before"]
    if kind in ("max_pool", "avg_pool"):
        window = {key: s[key] for key in ("stride", "padding")}
        if kind == "max_pool":
            return nn.MaxPool2d(s["kernel"], ceil_mode=s["ceil"], **window)
        return nn.AvgPool2d(s["kernel"], ceil_mode=s["ceil"], count_include_pad=False, **window)
    makers: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(before[-1], s["out"], bias=s["bias"]),
        "conv": lambda: nn.Conv2d(
            before[0], s["out"], s["kernel"], s["stride"], s["padding"], bias=s["bias"]
        ),
        "batch_norm": lambda: nn.BatchNorm2d(before[0], s["eps"], s["momentum"]),
        "global_avg_pool": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        "flatten": nn.Flatten,
        "relu": nn.ReLU,
        "sigmoid": nn.Sigmoid,
        "embedding": lambda: nn.Embedding(s["ids"], s["out"]),
        "lstm": lambda: LSTM(before[-1], s["out"], s["layers"], batch_first=True),
        "residual": lambda: Residual(layer["body"], layer["shortcut"]),
        "subsample": lambda: Subsample(s["out"], s["stride"]),
    }
    return makers[kind]()
