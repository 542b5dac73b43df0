"""PaddlePaddle, dynamic or (mode tuned) as a static graph, made by paddle.jit.to_static."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
from paddle import nn

Tensor = Any
Layer = dict[str, Any]
Batch = tuple[Tensor, Tensor]


class Adapter:
    """A layer that returns the loss, and paddle.optimizer.Momentum on the CPU; a process for each worker."""

    mechanism = "DataParallel over gloo"

    def __init__(self, job: dict[str, Any], weights: dict[str, Any]) -> None:
        paddle.set_device("cpu")
        paddle.base.core.set_num_threads(job["threads"] // job["workers"])
        self.workers = job["workers"]
        self.model = Model(job["network"]["layers"])
        linear = {id(one.weight) for one in self.model.sublayers() if isinstance(one, nn.Linear)}
        # Others are running statistics.
        self.parameters = [one for one in self.model.parameters() if not one.stop_gradient]
        for parameter, (name, array) in zip(self.parameters, weights.items(), strict=True):
            array = array.T if id(parameter) in linear else array
            assert tuple(parameter.shape) == array.shape, (name, parameter.shape, array.shape)
            parameter.set_value(array)
        self.optimiser = paddle.optimizer.Momentum(job["lr"], job["momentum"], self.parameters)
        self.loss = (
            paddle.jit.to_static(self.model, full_graph=True) if job["mode"] == "tuned" else self.model
        )
        if self.workers > 1:
            places = [f"127.0.0.1:{port}" for port in job["ports"]]
            os.environ |= {
                "PADDLE_TRAINER_ID": f"{job['rank']}",
                "PADDLE_TRAINERS_NUM": f"{self.workers}",
                "PADDLE_TRAINER_ENDPOINTS": ",".join(places),
                "PADDLE_CURRENT_ENDPOINT": places[job["rank"]],
                "PADDLE_DISTRI_BACKEND": "gloo",
            }
            paddle.distributed.init_parallel_env()
            self.loss = paddle.DataParallel(self.loss)

    def versions(self) -> dict[str, str]:
        class Version(ctypes.Structure):
            _fields_ = [(name, ctypes.c_int) for name in ("major", "minor", "patch")]

        told = {"paddle": paddle.version.full_version, "mkl": paddle.version.with_mkl}
        for file in (Path(paddle.__file__).parent / "libs").glob("libdnnl.so*"):
            found = ctypes.CDLL(str(file)).dnnl_version
            found.restype = ctypes.POINTER(Version)
            version = found().contents
            told["oneDNN"] = f"{version.major}.{version.minor}.{version.patch}"
        return told

    def num_parameters(self) -> int:
        return sum(math.prod(parameter.shape) for parameter in self.parameters)

    def put(self, inputs: Any, targets: Any) -> Batch:
        return paddle.to_tensor(inputs), paddle.to_tensor(targets)

    def _backward(self, batch: Batch) -> Tensor:
        self.optimiser.clear_grad(set_to_zero=False)
        loss = self.loss(*batch)
        loss.backward()
        return loss.detach()

    def identity(self, batch: Batch) -> tuple[float, float]:
        loss = self._backward(batch)
        return self.read(loss), math.sqrt(sum(float((one.grad**2).sum()) for one in self.parameters))

    def step(self, batch: Batch) -> Tensor:
        loss = self._backward(batch)
        self.optimiser.step()
        return loss

    def wait(self) -> None:
        """Return at once: on a CPU, a step returns when it is computed."""

    def read(self, loss: Tensor) -> float:
        return float(loss)

    def mean(self, losses: list[float]) -> list[float]:
        total = paddle.to_tensor(losses, dtype="float64")
        paddle.distributed.all_reduce(total)
        return [float(loss) / self.workers for loss in total]


class Model(nn.Layer):
    """A network and its mean cross-entropy."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.network = nn.Sequential(*map(build, layers))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.network(inputs)
        return nn.functional.cross_entropy(logits.reshape([-1, logits.shape[-1]]), targets.flatten())


class Residual(nn.Layer):
    def __init__(self, body: list[Layer], shortcut: list[Layer]) -> None:
        super().__init__()
        self.body, self.shortcut = nn.Sequential(*map(build, body)), nn.Sequential(*map(build, shortcut))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.shortcut(x)


class Subsample(nn.Layer):
    def __init__(self, out: int, stride: int) -> None:
        super().__init__()
        self.out, self.stride = out, stride

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return nn.functional.pad(x, [0, 0, 0, self.out - x.shape[1], 0, 0, 0, 0], pad_from_left_axis=True)


class LSTM(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def build(layer: Layer) -> nn.Layer:
    """Return the layer of Paddle's."""
    kind, s, before = layer["kind"], layer["settings"], layer["before"]
    makers: dict[str, Callable[[], nn.Layer]] = {
        "linear": lambda: nn.Linear(before[-1], s["out"], bias_attr=None if s["bias"] else False),
        "conv": lambda: nn.Conv2D(
            before[0],
            s["out"],
            s["kernel"],
            s["stride"],
            s["padding"],
            bias_attr=None if s["bias"] else False,
        ),
        "batch_norm": lambda: nn.BatchNorm2D(before[0], 1 - s["momentum"], s["eps"]),
        "max_pool": lambda: nn.MaxPool2D(s["kernel"], s["stride"], s["padding"], ceil_mode=s["ceil"]),
        "avg_pool": lambda: nn.AvgPool2D(s["kernel"], s["stride"], s["padding"], ceil_mode=s["ceil"]),
        "global_avg_pool": lambda: nn.Sequential(nn.AdaptiveAvgPool2D(1), nn.Flatten()),
        "flatten": nn.Flatten,
        "relu": nn.ReLU,
        "sigmoid": nn.Sigmoid,
        "embedding": lambda: nn.Embedding(s["ids"], s["out"]),
        "lstm": lambda: LSTM(before[-1], s["out"], s["layers"]),
        "residual": lambda: Residual(layer["body"], layer["shortcut"]),
        "subsample": lambda: Subsample(s["out"], s["stride"]),
    }
    if kind not in makers:
        raise NotImplementedError(f"this adapter has no layer of kind {kind}")
    return makers[kind]()
