"""TensorFlow: one tf.function for a step. tuned: compiled by XLA, and the LSTM unrolled.

Images are put as [samples, height, width, channels]: TensorFlow has no other convolutions on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

Tensor = Any
Layer = dict[str, Any]


class Adapter:
    """Variables, and functions of them; with several workers, a logical CPU device for each."""

    mechanism = "MirroredStrategy over logical CPU devices"

    def __init__(self, job: dict[str, Any], weights: dict[str, Any]) -> None:
        self.workers, tuned = job["workers"], job["mode"] == "tuned"
        tf.config.threading.set_intra_op_parallelism_threads(job["threads"])
        cpu, devices = tf.config.list_physical_devices("CPU")[0], [f"CPU:{n}" for n in range(self.workers)]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * self.workers
        )
        several = self.workers > 1
        self.strategy = tf.distribute.MirroredStrategy(devices) if several else tf.distribute.get_strategy()
        with self.strategy.scope():
            self.weights = [
                tf.Variable(w.transpose(2, 3, 1, 0) if w.ndim == 4 else w) for w in weights.values()
            ]
            self.velocity = [tf.Variable(tf.zeros_like(weight), trainable=False) for weight in self.weights]
        layers, lr, momentum = job["network"]["layers"], job["lr"], job["momentum"]

        def gradients(inputs: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
            with tf.GradientTape() as tape:
                logits = forward(layers, iter(self.weights), inputs, unroll=tuned)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits))
            return loss, [tf.convert_to_tensor(g) for g in tape.gradient(loss, self.weights)]

        def update(strategy: Any, gradients: list[Tensor]) -> None:
            for weight, velocity, gradient in zip(self.weights, self.velocity, gradients, strict=True):
                strategy.extended.update(velocity, lambda v, g: v.assign(momentum * v + g), (gradient,))
                strategy.extended.update(weight, lambda w, v: w.assign_sub(lr * v), (velocity,))

        compiled = (
            tf.function(gradients, autograph=False, jit_compile=True) if tuned and several else gradients
        )

        def worker(inputs: Tensor, targets: Tensor, train: bool) -> tuple[Tensor, list[Tensor]]:
            loss, found = compiled(inputs, targets)
            context = tf.distribute.get_replica_context()
            found = context.all_reduce(tf.distribute.ReduceOp.MEAN, found) if several else found
            if train:
                context.merge_call(update, (found,))
            return loss, [] if train else found

        def run(batch: tuple[Tensor, Tensor], train: bool) -> tuple[Tensor, list[Tensor]]:
            loss, found = self.strategy.run(worker, (*batch, train))
            return self.strategy.reduce("MEAN", loss, axis=None), self.strategy.experimental_local_results(
                found
            )[0]

        self._run = tf.function(run, autograph=False, jit_compile=tuned and not several)

    def versions(self) -> dict[str, str]:
        build = {name: str(value) for name, value in tf.sysconfig.get_build_info().items()}
        return {"tensorflow": tf.__version__, "build": str(build)}

    def num_parameters(self) -> int:
        return sum(math.prod(weight.shape) for weight in self.weights)

    def put(self, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        inputs = inputs.transpose(0, 2, 3, 1) if inputs.ndim == 4 else inputs
        parts = [tf.split(tf.constant(array), self.workers) for array in (inputs, targets)]
        put = self.strategy.experimental_distribute_values_from_function
        x, y = (put(lambda c, part=part: part[c.replica_id_in_sync_group]) for part in parts)
        return x, y

    def identity(self, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
        loss, gradients = self._run(batch, train=False)
        return float(loss), math.sqrt(sum(float(tf.reduce_sum(gradient**2)) for gradient in gradients))

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self._run(batch, train=True)[0]

    def wait(self) -> None:
        tf.test.experimental.sync_devices()

    def read(self, loss: Tensor) -> float:
        return float(loss)


def forward(layers: list[Layer], weights: Iterator[Tensor], x: Tensor, *, unroll: bool) -> Tensor:
    """Apply layers to a batch, taking their weights in turn."""
    for layer in layers:
        if layer["kind"] == "residual":
            body = forward(layer["body"], weights, x, unroll=unroll)
            x = body + forward(layer["shortcut"], weights, x, unroll=unroll)
        else:
            x = apply(layer, weights, x, unroll=unroll)
    return x


def apply(layer: Layer, weights: Iterator[Tensor], x: Tensor, *, unroll: bool) -> Tensor:
    """Apply a layer that has no others in it."""
    s = layer["settings"]
    match layer["kind"]:
        case "linear":
            x = product(x, next(weights))
            return x + next(weights) if s["bias"] else x
        case "conv":
            sides = [(0, 0), *[(s["padding"], s["padding"])] * 2, (0, 0)]
            x = tf.nn.conv2d(x, next(weights), s["stride"], sides)
            return x + next(weights) if s["bias"] else x
        case "batch_norm":
            scale, shift = next(weights), next(weights)
            none = tf.zeros(0)  # running statistics
            return tf.raw_ops.FusedBatchNormV3(
                x=x, scale=scale, offset=shift, mean=none, variance=none, epsilon=s["eps"]
            )[0]
        case "max_pool":
            return tf.nn.max_pool2d(padded(layer, x, x.dtype.min), s["kernel"], s["stride"], "VALID")
        case "avg_pool":
            x, inside = padded(layer, x, 0.0), padded(layer, tf.ones_like(x[:1]), 0.0)
            sums, counts = (tf.nn.avg_pool2d(y, s["kernel"], s["stride"], "VALID") for y in (x, inside))
            return sums / counts
        case "global_avg_pool":
            return tf.reduce_mean(x, (1, 2))
        case "flatten":
            x = tf.transpose(x, (0, 3, 1, 2)) if len(x.shape) == 4 else x
            return tf.reshape(x, (x.shape[0], -1))
        case "relu":
            return tf.nn.relu(x)
        case "sigmoid":
            return tf.sigmoid(x)
        case "embedding":
            return tf.gather(next(weights), x)
        case "lstm":
            for _ in range(s["layers"]):
                x = lstm([next(weights) for _ in range(4)], x, unroll=unroll)
            return x
        case "subsample":
            x = x[:, :: s["stride"], :: s["stride"]]
            return tf.pad(x, ((0, 0), (0, 0), (0, 0), (0, s["out"] - x.shape[-1])))
    raise NotImplementedError(f"this adapter has no layer of kind {layer['kind']}")


def padded(layer: Layer, x: Tensor, value: float) -> Tensor:
    """Pad images for windows; padding at the ends reaches as far as the last window does."""
    s = layer["settings"]
    kernel, stride, padding = s["kernel"], s["stride"], s["padding"]
    sides = [
        (padding, max(0, (after - 1) * stride + kernel - before - padding))
        for before, after in zip(layer["before"][1:], layer["after"][1:], strict=True)
    ]
    return tf.pad(x, ((0, 0), *sides, (0, 0)), constant_values=value)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply by a weight [out, in]."""
    flat = tf.matmul(tf.reshape(x, (-1, x.shape[-1])), weight, transpose_b=True)
    return tf.reshape(flat, (*x.shape[:-1], weight.shape[0]))


def lstm(weights: list[Tensor], x: Tensor, *, unroll: bool) -> Tensor:
    """Run a layer over the steps; gates in cuDNN's order: input, forget, cell, output."""
    w_input, w_hidden, b_input, b_hidden = weights
    gates = tf.transpose(product(x, w_input) + b_input + b_hidden, (1, 0, 2))
    zero = tf.zeros((x.shape[0], w_hidden.shape[1]))

    def step(state: tuple[Tensor, Tensor], gates_n: Tensor) -> tuple[Tensor, Tensor]:
        hidden, cell = state
        i, f, g, o = tf.split(gates_n + product(hidden, w_hidden), 4, axis=-1)
        cell = tf.sigmoid(f) * cell + tf.sigmoid(i) * tf.tanh(g)
        return tf.sigmoid(o) * tf.tanh(cell), cell

    if not unroll:
        return tf.transpose(tf.scan(step, gates, (zero, zero))[0], (1, 0, 2))
    states = [(zero, zero)]
    for gates_n in tf.unstack(gates):
        states.append(step(states[-1], gates_n))
    return tf.stack([hidden for hidden, _ in states[1:]], axis=1)
