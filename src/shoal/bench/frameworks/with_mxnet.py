"""MXNet's Gluon, imperative or (mode tuned) hybridised with static memory and shapes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

Array = Any
Layer = dict[str, Any]
Batch = list[tuple[Array, Array]]  # of each worker


class Adapter:
    """A block and a trainer; with several workers, a context for each, joined by a KVStore."""

    mechanism = "KVStore device over CPU contexts"

    def __init__(self, job: dict[str, Any], weights: dict[str, Any]) -> None:
        self.contexts = [mx.cpu(number) for number in range(job["workers"])]
        self.network, self.loss = (
            chain(map(build, job["network"]["layers"])),
            gluon.loss.SoftmaxCrossEntropyLoss(),
        )
        self.network.initialize(ctx=self.contexts)
        held = self.network.collect_params().values()
        self.parameters = [parameter for parameter in held if parameter.grad_req != "null"]
        for parameter, (name, array) in zip(self.parameters, weights.items(), strict=True):
            assert parameter.shape == array.shape, (name, parameter.shape, array.shape)
            parameter.set_data(mx.nd.array(array))
        if job["mode"] == "tuned":
            for block in (self.network, self.loss):
                block.hybridize(static_alloc=True, static_shape=True)
        settings = {"learning_rate": job["lr"], "momentum": job["momentum"]}
        self.trainer = gluon.Trainer(self.network.collect_params(), "sgd", settings, kvstore="device")

    def versions(self) -> dict[str, str]:
        enabled = [feature.name for feature in mx.runtime.feature_list() if feature.enabled]
        told = {"mxnet": mx.__version__, "features": " ".join(enabled)}
        library = ctypes.CDLL(mx.libinfo.find_lib_path()[0])
        if hasattr(library, "openblas_get_config"):
            library.openblas_get_config.restype = ctypes.c_char_p
            told["OpenBLAS"] = library.openblas_get_config().decode()
        return told

    def num_parameters(self) -> int:
        return sum(math.prod(parameter.shape) for parameter in self.parameters)

    def put(self, inputs: Any, targets: Any) -> Batch:
        parts = [gluon.utils.split_and_load(array, self.contexts) for array in (inputs, targets)]
        return list(zip(*parts, strict=True))

    def _backward(self, batch: Batch) -> list[Array]:
        with autograd.record():
            losses = [self.loss(self.network(x), y).mean() for x, y in batch]
        autograd.backward(losses)
        return losses

    def identity(self, batch: Batch) -> tuple[float, float]:
        losses, squares = self._backward(batch), 0.0
        for parameter in self.parameters:
            parts = [gradient.asnumpy() for gradient in parameter.list_grad()]
            squares += float(((sum(parts) / len(parts)) ** 2).sum())
        return self.read(losses), math.sqrt(squares)

    def step(self, batch: Batch) -> list[Array]:
        losses = self._backward(batch)
        self.trainer.step(len(batch))  # divides the sum of the workers' gradients
        return losses

    def wait(self) -> None:
        mx.nd.waitall()

    def read(self, loss: list[Array]) -> float:
        return sum(float(one.asscalar()) for one in loss) / len(loss)


class Residual(nn.HybridBlock):
    def __init__(self, body: list[Layer], shortcut: list[Layer]) -> None:
        super().__init__()
        self.body, self.shortcut = chain(map(build, body)), chain(map(build, shortcut))

    def hybrid_forward(self, F: Any, x: Array) -> Array:
        return self.body(x) + (self.shortcut(x) if len(self.shortcut) else x)


class Subsample(nn.HybridBlock):
    def __init__(self, new: int, stride: int) -> None:
        super().__init__()
        self.new, self.stride = new, stride

    def hybrid_forward(self, F: Any, x: Array) -> Array:
        x = F.slice(x, begin=(None,) * 4, end=(None,) * 4, step=(1, 1, self.stride, self.stride))
        zero = F.zeros_like(F.slice_axis(x, axis=1, begin=0, end=1))
        return F.concat(x, F.repeat(zero, self.new, axis=1), dim=1) if self.new else x


def chain(blocks: Iterable[nn.HybridBlock]) -> nn.HybridSequential:
    found = nn.HybridSequential()
    found.add(*blocks)
    return found


def build(layer: Layer) -> nn.HybridBlock:
    """Return the block of one layer."""
    kind, s, before = layer["kind"], layer["settings"], layer["before"]
    if kind in ("conv", "max_pool", "avg_pool"):
        window = {"strides": s["stride"], "padding": s["padding"]}
    makers: dict[str, Callable[[], nn.HybridBlock]] = {
        "linear": lambda: nn.Dense(s["out"], use_bias=s["bias"], flatten=False, in_units=before[-1]),
        "conv": lambda: nn.Conv2D(s["out"], s["kernel"], **window, use_bias=s["bias"], in_channels=before[0]),
        "batch_norm": lambda: nn.BatchNorm(1, 1 - s["momentum"], s["eps"], in_channels=before[0]),
        "max_pool": lambda: nn.MaxPool2D(s["kernel"], **window, ceil_mode=s["ceil"]),
        "avg_pool": lambda: nn.AvgPool2D(s["kernel"], **window, ceil_mode=s["ceil"], count_include_pad=False),
        "global_avg_pool": lambda: chain((nn.GlobalAvgPool2D(), nn.Flatten())),
        "flatten": nn.Flatten,
        "relu": lambda: nn.Activation("relu"),
        "sigmoid": lambda: nn.Activation("sigmoid"),
        "embedding": lambda: nn.Embedding(s["ids"], s["out"]),
        "lstm": lambda: gluon.rnn.LSTM(s["out"], s["layers"], "NTC", input_size=before[-1]),
        "residual": lambda: Residual(layer["body"], layer["shortcut"]),
        "subsample": lambda: Subsample(s["out"] - before[0], s["stride"]),
    }
    if kind not in makers:
        raise NotImplementedError(f"this adapter has no layer of kind {kind}")
    return makers[kind]()
