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
    """A plain module and torch.optim.SGD, in fp32: without TF32, which convolutions on GPUs would use.

    On the CPU there is a process for each worker.
    """

    mechanism = "DistributedDataParallel over gloo"

    def __init__(self, job: dict[str, Any], weights: dict[str, Any]) -> None:
        self.workers, tuned = job["workers"], job["mode"] == "tuned"
        torch.set_num_threads(job["threads"] // self.workers)
        torch.backends.cudnn.allow_tf32 = False
        self.device = torch.device(job["device"])
        self.tokens = job["network"]["is_tokens"]
        self.module = nn.Sequential(*map(build, job["network"]["layers"]))
        for module in self.module.modules():
            if isinstance(module, Unembedding):
                module.embeddings = [one for one in self.module.modules() if isinstance(one, nn.Embedding)]
        for (name, array), parameter in zip(weights.items(), self.module.parameters(), strict=True):
            with torch.no_grad():
                assert tuple(parameter.shape) == array.shape, (name, parameter.shape, array.shape)
                parameter.copy_(torch.from_numpy(array))
        self.module.to(self.device)
        self.network: nn.Module = self.module
        if self.workers > 1:
            place = f"tcp://127.0.0.1:{job['ports'][0]}"
            distributed.init_process_group("gloo", place, rank=job["rank"], world_size=self.workers)
            self.network = DistributedDataParallel(self.module)
        self.optimiser = torch.optim.SGD(self.module.parameters(), lr=job["lr"], momentum=job["momentum"])
        self.loss = torch.compile(self._loss, options=_compiling()) if tuned else self._loss

    def versions(self) -> dict[str, str]:
        on = torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"
        return {"torch": torch.__version__, "device": on, "build": torch.__config__.show()}

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    def put(self, inputs: Any, targets: Any) -> Batch:
        x, y = (torch.from_numpy(array).to(self.device) for array in (inputs, targets))
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
        if self.device.type == "cuda":  # on a CPU, a step returns when it is computed
            torch.cuda.synchronize()

    def read(self, loss: Tensor) -> float:
        return loss.item()

    def mean(self, losses: list[float]) -> list[float]:
        total = torch.tensor(losses, dtype=torch.float64)
        distributed.all_reduce(total)
        return [loss / self.workers for loss in total.tolist()]


def _compiling() -> dict[str, Any]:
    """Return the settings of torch.compile.

    In torch 2.13, its reordering can read the gradient of max pooling before it is computed, so that
    convolutions get a gradient of 0 (https://github.com/pytorch/pytorch/issues/185509).
    """
    known = torch._inductor.list_options()
    return {"reorder_for_peak_memory": False} if "reorder_for_peak_memory" in known else {}


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


class Embedding(nn.Embedding):
    def __init__(self, steps: int, ids: int, out: int) -> None:
        super().__init__(ids, out)
        self.positions = nn.Parameter(torch.zeros(steps, out))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.positions


class Unembedding(nn.Module):
    embeddings: list[nn.Embedding]  # a list, so that the module is not registered twice

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.embeddings[0].weight)


class Attention(nn.Module):
    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = (
            heads,
            nn.Linear(features, 3 * features),
            nn.Linear(features, features),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


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
        "embedding": lambda: (
            Embedding(before[0], s["ids"], s["out"]) if s["positions"] else nn.Embedding(s["ids"], s["out"])
        ),
        "unembedding": Unembedding,
        "attention": lambda: Attention(before[-1], s["heads"]),
        "layer_norm": lambda: nn.LayerNorm(before[-1], s["eps"]),
        "gelu": lambda: nn.GELU(approximate="tanh"),
        "lstm": lambda: LSTM(before[-1], s["out"], s["layers"], batch_first=True),
        "residual": lambda: Residual(layer["body"], layer["shortcut"]),
        "subsample": lambda: Subsample(s["out"], s["stride"]),
    }
    if kind not in makers:
        raise NotImplementedError(f"this adapter has no layer of kind {kind}")
    return makers[kind]()
