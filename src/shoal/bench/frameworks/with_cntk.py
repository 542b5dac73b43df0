"""CNTK 2.7 through its Python package. tuned: samples are made CNTK's values once, not in each step.

It runs with Python 3.6, and so must this file and harness.py: annotations with brackets are in quotes.
"""

import math
from collections.abc import Iterator
from typing import Any

import cntk as C
import numpy as np


class Adapter:
    """A function of parameters, and CNTK's trainer, on the CPU."""

    def __init__(self, job: "dict[str, Any]", weights: "dict[str, Any]") -> None:
        C.device.try_set_default_device(C.device.cpu())
        C.cntk_py.set_max_num_cputhreads(job["threads"])
        layers = job["network"]["layers"]
        self.tuned, self.tokens = job["mode"] == "tuned", job["network"]["is_tokens"]
        self.classes = layers[-1]["after"][-1]
        if self.tokens:
            ids = layers[0]["settings"]["ids"]
            self.inputs = C.sequence.input_variable(ids)
            self.targets = C.sequence.input_variable(self.classes)
        else:
            self.inputs = C.input_variable(tuple(layers[0]["before"]))
            self.targets = C.input_variable(self.classes)
        logits = self.chain(layers, iter(weights.values()), self.inputs)
        self.loss = C.cross_entropy_with_softmax(logits, self.targets)
        rate, momentum = C.learning_parameter_schedule(job["lr"]), C.momentum_schedule(job["momentum"])
        learner = C.momentum_sgd(self.loss.parameters, rate, momentum, unit_gain=False)
        self.trainer = C.Trainer(logits, (self.loss, None), [learner])

    def versions(self) -> "dict[str, str]":
        return {"cntk": C.__version__, "device": str(C.device.use_default_device())}

    def num_parameters(self) -> int:
        return sum(int(np.prod(parameter.shape)) for parameter in self.loss.parameters)

    def put(self, inputs: Any, targets: Any) -> "dict[Any, Any]":
        if self.tokens:
            held = {self.inputs: inputs, self.targets: targets}
            return {
                variable: C.Value.one_hot(ids.tolist(), variable.shape[0]) for variable, ids in held.items()
            }
        labels = np.eye(self.classes, dtype=np.float32)[targets]
        if self.tuned:
            inputs, labels = C.Value(inputs), C.Value(labels)
        return {self.inputs: inputs, self.targets: labels}

    def identity(self, batch: "dict[Any, Any]") -> "tuple[float, float]":
        output = self.loss.output
        state, values = self.loss.forward(batch, [output], {output})
        losses = values[output]  # of each sample; of each step, in a list of sequences
        ones = [np.ones_like(loss) for loss in losses] if self.tokens else np.ones_like(losses)
        gradients = self.loss.backward(state, {output: ones}, set(self.loss.parameters))
        count = sum(np.size(loss) for loss in losses)
        norm = math.sqrt(
            sum(float((np.asarray(gradient, np.float64) ** 2).sum()) for gradient in gradients.values())
        )
        return sum(float(np.sum(loss)) for loss in losses) / count, norm / count

    def step(self, batch: "dict[Any, Any]") -> float:
        self.trainer.train_minibatch(batch)
        return float(self.trainer.previous_minibatch_loss_average)

    def wait(self) -> None:
        """Return at once: a step reads its loss."""

    def read(self, loss: float) -> float:
        return loss

    def parameter(self, array: Any) -> Any:
        return C.parameter(shape=array.shape, init=np.ascontiguousarray(array))

    def chain(self, layers: "list[dict[str, Any]]", weights: "Iterator[Any]", x: Any) -> Any:
        """Apply layers, taking their weights in turn."""
        for layer in layers:
            kind, s, before = layer["kind"], layer["settings"], x
            if kind == "residual":
                body = self.chain(layer["body"], weights, x)
                x = body + self.chain(layer["shortcut"], weights, x)
            elif kind in ("max_pool", "avg_pool"):
                x = pool(layer, x)
            elif kind == "lstm":
                for _ in range(s["layers"]):
                    x = lstm(x, *[self.parameter(next(weights).T) for _ in range(4)])
            elif kind in SIMPLE:
                x = SIMPLE[kind](x, s)
            else:
                x = self.weighted(layer, weights, x)
            after = tuple(layer["after"])[1:] if self.tokens else tuple(layer["after"])
            if tuple(x.shape) != after:
                raise NotImplementedError(
                    f"{kind} makes {x.shape} of {before.shape}, the description {after}"
                )
        return x

    def weighted(self, layer: "dict[str, Any]", weights: "Iterator[Any]", x: Any) -> Any:
        """Apply a layer that has weights."""
        kind, s = layer["kind"], layer["settings"]
        if kind == "embedding":
            return C.times(x, self.parameter(next(weights)))
        if kind == "linear":
            x = C.times(x, self.parameter(next(weights).T))
            return x + self.parameter(next(weights)) if s["bias"] else x
        if kind == "conv":
            steps, padded = (1, s["stride"], s["stride"]), pad(x, s["padding"], 0)
            x = C.convolution(self.parameter(next(weights)), padded, strides=steps, auto_padding=[False] * 3)
            return x + self.parameter(next(weights)[:, None, None]) if s["bias"] else x
        if kind == "batch_norm":
            scale, shift = self.parameter(next(weights)), self.parameter(next(weights))
            running = [C.constant(value, shape=scale.shape) for value in (0, 1)]
            options = {"epsilon": s["eps"], "use_cudnn_engine": False, "running_count": C.constant(0)}
            return C.batch_normalization(x, scale, shift, *running, True, **options)
        raise NotImplementedError(f"this adapter has no layer of kind {kind}")


def pad(x: Any, size: int, value: float) -> Any:
    """Add values at the sides of images."""
    sides = [(0, 0), (size, size), (size, size)]
    return C.pad(x, pattern=sides, mode=C.ops.CONSTANT_PAD, constant_value=value) if size else x


def pool(layer: "dict[str, Any]", x: Any) -> Any:
    """Pool windows; an average is over what lies inside."""
    s, largest = layer["settings"], layer["kind"] == "max_pool"
    if s["padding"] and not largest:
        raise NotImplementedError("CNTK pads averages by a rule of its own")
    x = pad(x, s["padding"], -1e30)
    window, steps = (s["kernel"],) * 2, (s["stride"],) * 2
    kind = C.MAX_POOLING if largest else C.AVG_POOLING
    return C.pooling(x, kind, window, steps, auto_padding=[False], ceil_out_dim=s["ceil"])


def subsample(x: Any, s: "dict[str, Any]") -> Any:
    """Take every `stride`-th pixel; new channels are zero."""
    added, ends = s["out"] - x.shape[0], list(x.shape[1:])
    x = C.slice(x, [1, 2], [0, 0], ends, strides=[s["stride"]] * 2)
    return C.pad(x, pattern=[(0, added), (0, 0), (0, 0)], mode=C.ops.CONSTANT_PAD) if added else x


SIMPLE = {
    "global_avg_pool": lambda x, s: C.reshape(C.reduce_mean(x, axis=[1, 2]), (-1,)),
    "flatten": lambda x, s: C.reshape(x, (-1,)),
    "relu": lambda x, s: C.relu(x),
    "sigmoid": lambda x, s: C.sigmoid(x),
    "subsample": subsample,
}


def lstm(x: Any, w_input: Any, w_hidden: Any, b_input: Any, b_hidden: Any) -> Any:
    """Run a layer over the steps; gates in cuDNN's order: input, forget, cell, output."""
    size = w_hidden.shape[0]
    states = [C.placeholder(shape=(size,), dynamic_axes=x.dynamic_axes) for _ in range(2)]
    hidden, cell = (C.sequence.past_value(state) for state in states)
    gates = C.times(x, w_input) + b_input + b_hidden + C.times(hidden, w_hidden)
    i, f, g, o = (C.slice(gates, -1, n * size, (n + 1) * size) for n in range(4))
    cell = C.sigmoid(f) * cell + C.sigmoid(i) * C.tanh(g)
    hidden = C.sigmoid(o) * C.tanh(cell)
    return hidden.replace_placeholders({states[0]: hidden.output, states[1]: cell.output})
