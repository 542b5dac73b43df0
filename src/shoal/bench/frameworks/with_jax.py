"""JAX: one jitted function for a step. tuned: with the buffers of the weights, and the LSTM unrolled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Array = Any
Layer = dict[str, Any]


class Adapter:
    """Pure functions of a list of weights; with several workers, a device of the host for each."""

    mechanism = "shard_map over devices of the host"

    def __init__(self, job: dict[str, Any], weights: dict[str, Any]) -> None:
        self.workers, tuned = job["workers"], job["mode"] == "tuned"
        jax.config.update("jax_num_cpu_devices", self.workers)  # before the first device is asked for
        if job["device"] == "cuda":
            if jax.default_backend() != "gpu":
                raise RuntimeError(f"this JAX computes on {jax.default_backend()}: install jax[cuda]")
            jax.config.update("jax_default_matmul_precision", "highest")  # fp32, without TF32
        mesh = Mesh(jax.devices()[: self.workers], ("workers",))
        whole, cut = PartitionSpec(), PartitionSpec("workers")
        self.cut = NamedSharding(mesh, cut)
        layers, lr, momentum = job["network"]["layers"], job["lr"], job["momentum"]
        self.weights = [jax.device_put(array, NamedSharding(mesh, whole)) for array in weights.values()]
        self.velocity = [jnp.zeros_like(weight) for weight in self.weights]

        def loss(weights: list[Array], inputs: Array, targets: Array) -> Array:
            logits = forward(layers, iter(weights), inputs, unroll=tuned, embedding=weights[0])
            scores = jax.nn.log_softmax(logits.reshape(-1, logits.shape[-1]))
            return -jnp.take_along_axis(scores, targets.reshape(-1, 1), axis=1).mean()

        def gradients(weights: list[Array], inputs: Array, targets: Array) -> Any:
            return lax.pmean(jax.value_and_grad(loss)(weights, inputs, targets), "workers")

        found = jax.value_and_grad(loss)
        if self.workers > 1:
            found = jax.shard_map(
                gradients, mesh=mesh, in_specs=(whole, cut, cut), out_specs=whole, check_vma=False
            )

        def step(weights: list[Array], velocity: list[Array], inputs: Array, targets: Array) -> Any:
            value, gradient = found(weights, inputs, targets)
            velocity = [momentum * v + g for v, g in zip(velocity, gradient, strict=True)]
            return value, [w - lr * v for w, v in zip(weights, velocity, strict=True)], velocity

        self._gradients = jax.jit(found)
        self._step = jax.jit(step, donate_argnums=(0, 1) if tuned else ())

    def versions(self) -> dict[str, str]:
        return {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "backend": jax.default_backend()}

    def num_parameters(self) -> int:
        return sum(weight.size for weight in self.weights)

    def put(self, inputs: Any, targets: Any) -> tuple[Array, Array]:
        return jax.device_put(inputs, self.cut), jax.device_put(targets, self.cut)

    def identity(self, batch: tuple[Array, Array]) -> tuple[float, float]:
        value, gradients = self._gradients(self.weights, *batch)
        return float(value), math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))

    def step(self, batch: tuple[Array, Array]) -> Array:
        loss, self.weights, self.velocity = self._step(self.weights, self.velocity, *batch)
        return loss

    def wait(self) -> None:
        jax.block_until_ready((self.weights, self.velocity))

    def read(self, loss: Array) -> float:
        return float(loss)


def forward(layers: list[Layer], weights: Iterator[Array], x: Array, **options: Any) -> Array:
    """Apply layers to a batch, taking their weights in turn; an unembedding takes those of the first."""
    for layer in layers:
        if layer["kind"] == "residual":
            body = forward(layer["body"], weights, x, **options)
            x = body + forward(layer["shortcut"], weights, x, **options)
        elif layer["kind"] == "unembedding":
            x = x @ options["embedding"].T
        else:
            x = apply(layer, weights, x, unroll=options["unroll"])
    return x


def apply(layer: Layer, weights: Iterator[Array], x: Array, *, unroll: bool) -> Array:
    """Apply a layer that has no others in it."""
    s = layer["settings"]
    match layer["kind"]:
        case "linear":
            x = x @ next(weights).T
            return x + next(weights) if s["bias"] else x
        case "conv":
            sides = [(s["padding"], s["padding"])] * 2
            strides = (s["stride"], s["stride"])
            x = lax.conv_general_dilated(
                x, next(weights), strides, sides, dimension_numbers=("NCHW", "OIHW", "NCHW")
            )
            return x + next(weights)[:, None, None] if s["bias"] else x
        case "batch_norm":
            mean, var = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
            scale, shift = next(weights)[:, None, None], next(weights)[:, None, None]
            return (x - mean) * lax.rsqrt(var + s["eps"]) * scale + shift
        case "max_pool":
            return windows(layer, x, -jnp.inf, lax.max)
        case "avg_pool":
            return windows(layer, x, 0.0, lax.add) / windows(layer, jnp.ones_like(x), 0.0, lax.add)
        case "global_avg_pool":
            return x.mean((2, 3))
        case "flatten":
            return x.reshape(len(x), -1)
        case "relu":
            return jax.nn.relu(x)
        case "sigmoid":
            return jax.nn.sigmoid(x)
        case "gelu":
            return jax.nn.gelu(x, approximate=True)
        case "layer_norm":
            x = x - x.mean(-1, keepdims=True)
            return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + s["eps"]) * next(weights) + next(weights)
        case "attention":
            return attention([next(weights) for _ in range(4)], x, s["heads"])
        case "embedding":
            x = next(weights)[x]
            return x + next(weights) if s["positions"] else x
        case "lstm":
            for _ in range(s["layers"]):
                x = lstm([next(weights) for _ in range(4)], x, unroll=unroll)
            return x
        case "subsample":
            x = x[:, :, :: s["stride"], :: s["stride"]]
            return jnp.pad(x, ((0, 0), (0, s["out"] - x.shape[1]), (0, 0), (0, 0)))
    raise NotImplementedError(f"this adapter has no layer of kind {layer['kind']}")


def windows(layer: Layer, x: Array, start: float, combine: Any) -> Array:
    """Reduce windows; padding at the ends reaches as far as the last window does."""
    s = layer["settings"]
    kernel, stride, padding = s["kernel"], s["stride"], s["padding"]
    ends = [
        (padding, max(0, (after - 1) * stride + kernel - before - padding))
        for before, after in zip(layer["before"][1:], layer["after"][1:], strict=True)
    ]
    sizes, strides = (1, 1, kernel, kernel), (1, 1, stride, stride)
    return lax.reduce_window(x, start, combine, sizes, strides, [(0, 0), (0, 0), *ends])


def attention(weights: list[Array], x: Array, heads: int) -> Array:
    """Attend to all steps before and to the own one."""
    w_in, b_in, w_out, b_out = weights
    qkv = (x @ w_in.T + b_in).reshape(*x.shape[:2], 3, heads, -1)
    y = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
    return y.reshape(x.shape) @ w_out.T + b_out


def lstm(weights: list[Array], x: Array, *, unroll: bool) -> Array:
    """Run a layer over the steps; gates in cuDNN's order: input, forget, cell, output."""
    w_input, w_hidden, b_input, b_hidden = weights
    gates = x @ w_input.T + b_input + b_hidden
    zero = jnp.zeros((len(x), w_hidden.shape[1]), x.dtype)

    def step(state: tuple[Array, Array], gates_n: Array) -> tuple[tuple[Array, Array], Array]:
        hidden, cell = state
        i, f, g, o = jnp.split(gates_n + hidden @ w_hidden.T, 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    _, outputs = lax.scan(step, (zero, zero), gates.swapaxes(0, 1), unroll=x.shape[1] if unroll else 1)
    return outputs.swapaxes(0, 1)
