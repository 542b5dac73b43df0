"""Caffe through its program: `caffe train` with a network and a solver that are written here.

Weights and samples reach it in one .caffemodel file, the samples as blobs of `Parameter` layers with learning
rate 0: every build reads them, and data layers would need LMDB, LevelDB or HDF5. So each step trains on the
batch of the first one. A step ends at the time of its line in the log. tuned: activations in place.

Formats: caffe.proto, solver.cpp and net.cpp of BVLC Caffe 1.0.
"""

from __future__ import annotations

import atexit
import math
import os
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np

Layer = dict[str, Any]
Batch = tuple[Any, Any]

_LOSS = re.compile(r"I\d+ (\d\d):(\d\d):(\d\d\.\d+) .*\] Iteration \d+(?: \(.*\))?, loss = (\S+)")
_NORM = re.compile(r"All net params \(data, diff\): .*L2 norm = \(\S+, (\S+)\)")
_IN_PLACE_AFTER = (
    "linear",
    "conv",
    "batch_norm",
    "residual",
)  # whose backward pass does not read their output


class Adapter:
    """A process of `caffe train` on the CPU for each question: how many numbers, what gradient, how fast."""

    def __init__(self, job: dict[str, Any], weights: dict[str, Any]) -> None:
        if any(layer["kind"] == "lstm" for layer in job["network"]["layers"]):
            raise NotImplementedError("Caffe's LSTM has one bias vector, and the description has two")
        self.job, self.folder = job, os.path.dirname(job["weights"])
        layers, left = job["network"]["layers"], iter(weights.values())
        self.net = Net(in_place=job["mode"] == "tuned")
        data = self.net.samples((job["batch"], *layers[0]["before"]))
        labels = self.net.samples((job["batch"],))
        self.names = (data, labels)
        self.net.add("SoftmaxWithLoss", (self.net.chain(layers, left, data), labels))
        self.child: subprocess.Popen[str] | None = None
        self.now = 0.0  # of the last line with a loss

    def versions(self) -> dict[str, str]:
        program = self.job["program"]
        told = [
            subprocess.run(words, capture_output=True, text=True, errors="replace", check=False).stdout
            for words in ([program, "--version"], ["ldd", program])
        ]
        return {
            "caffe": told[0].partition("version")[2].split("\n")[0].strip(),
            "blas": " ".join(sorted(set(re.findall(r"lib\w*(?:blas|mkl|atlas)[\w.]*", told[1])))),
        }

    def num_parameters(self) -> int:
        """Count the numbers that a snapshot has; Caffe takes one without training."""
        self._log(0)
        with open(self._path("caffe_iter_0.caffemodel"), "rb") as file:
            count = sum(trained_sizes(memoryview(file.read()), self.net.trained))
        for suffix in ("caffemodel", "solverstate"):
            os.remove(self._path(f"caffe_iter_0.{suffix}"))
        return count

    def put(self, inputs: Any, targets: Any) -> Batch:
        return inputs, targets

    def identity(self, batch: Batch) -> tuple[float, float]:
        log = self._log(1, batch)
        loss, norm = _LOSS.search(log), _NORM.search(log)
        if loss is None or norm is None:
            raise RuntimeError("caffe train printed no loss, or no norm of the gradient")
        return float(loss[4]), float(norm[1])

    def step(self, batch: Batch) -> float:
        if self.child is None:
            self.child = self._start(self.job["warmup"] + self.job["steps"], batch)
            atexit.register(self.child.kill)  # it goes on after its last step, beside the next measurement
        assert self.child.stderr is not None
        lines = []
        for line in self.child.stderr:
            if found := _LOSS.match(line):
                hours, minutes, seconds, loss = map(float, found.groups())
                # In parts of a second that add up without rounding.
                now = round((3600 * hours + 60 * minutes + seconds) * 2**20) / 2**20
                self.now = now if now >= self.now else now + 86400  # after midnight
                return loss
            lines.append(line)
        raise RuntimeError(last_words("".join(lines), self.child.wait()))

    def clock(self) -> float:
        """Return when the last loss was computed: Caffe does not wait until its lines are read."""
        return self.now

    def wait(self) -> None:
        """Return at once: a line is printed when its loss is computed."""

    def read(self, loss: float) -> float:
        return loss

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _log(self, iterations: int, batch: Batch | None = None) -> str:
        child = self._start(iterations, batch, debug=True)
        log = child.communicate()[1]
        if child.returncode:
            raise RuntimeError(last_words(log, child.returncode))
        return log

    def _start(self, iterations: int, batch: Batch | None, *, debug: bool = False) -> subprocess.Popen[str]:
        samples = dict(zip(self.names, ([array] for array in batch or ()), strict=False))
        solver = {
            "net": f'"{self._path("net.prototxt")}"',
            "base_lr": self.job["lr"],
            "lr_policy": '"fixed"',
            "momentum": self.job["momentum"],
            "display": 1,
            "max_iter": iterations,
            "snapshot_prefix": f'"{self._path("caffe")}"',
            "snapshot_after_train": str(batch is None).lower(),
            "debug_info": str(debug).lower(),
            "solver_mode": "CPU",
        }
        for name, text in (("net", self.net.text), ("solver", settings(solver))):
            with open(self._path(f"{name}.prototxt"), "w", encoding="utf-8") as file:
                file.write(text)
        with open(self._path("start.caffemodel"), "wb") as file:
            file.writelines(model({**self.net.blobs, **samples}))
        words = [self.job["program"], "train"]
        words += [f"--solver={self._path('solver.prototxt')}", f"--weights={self._path('start.caffemodel')}"]
        return subprocess.Popen(
            ["env", f"GLOG_log_dir={self.folder}", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )


def last_words(log: str, status: int) -> str:
    """Return the line of a failed check, or the last line."""
    lines = log.splitlines() or ["it printed nothing"]
    fatal = next((line for line in lines if re.match(r"F\d+ ", line)), lines[-1])
    return f"caffe train ended with status {status}: {fatal}"


class Net:
    """Text of a network, and what its blobs hold."""

    def __init__(self, *, in_place: bool) -> None:
        self.text, self.in_place, self.count = "", in_place, 0
        self.blobs: dict[str, list[Any]] = {}
        self.trained: set[str] = set()

    def add(
        self,
        kind: str,
        bottoms: tuple[str, ...],
        *blobs: Any,
        top: str = "",
        frozen: bool = False,
        **parameters: dict[str, Any],
    ) -> str:
        """Append a layer with its parameters and blobs; return its output's name."""
        name = f"{kind}{self.count}"
        self.count += 1
        self.text += f'layer {{\n  name: "{name}"\n  type: "{kind}"\n'
        self.text += "".join(f'  bottom: "{bottom}"\n' for bottom in bottoms) + f'  top: "{top or name}"\n'
        self.text += "  param { lr_mult: 0 }\n" if frozen else ""
        self.text += "".join(f"  {key} {{ {settings(given)}}}\n" for key, given in parameters.items()) + "}\n"
        if blobs:
            self.blobs[name] = list(blobs)
            if not frozen:
                self.trained.add(name)
        return top or name

    def samples(self, shape: tuple[int, ...]) -> str:
        """Append a layer whose blob is given with the weights."""
        dims = " ".join(f"dim: {size}" for size in shape)
        return self.add("Parameter", (), frozen=True, parameter_param={"shape": f"{{ {dims} }}"})

    def chain(self, layers: list[Layer], weights: Iterator[Any], blob: str) -> str:
        """Append layers, taking their weights in turn."""
        before = ""
        for layer in layers:
            blob = self.put(layer, weights, blob, blob if before in _IN_PLACE_AFTER and self.in_place else "")
            before = layer["kind"]
        return blob

    def put(self, layer: Layer, weights: Iterator[Any], x: str, place: str) -> str:
        """Append a layer; `place` is the blob that an activation may overwrite."""
        s, kind = layer["settings"], layer["kind"]
        match kind:
            case "residual":
                body = self.chain(layer["body"], weights, x)
                return self.add("Eltwise", (body, self.chain(layer["shortcut"], weights, x)))
            case "linear" | "conv":
                given = {"num_output": layer["after"][-1 if kind == "linear" else 0]}
                given["bias_term"] = str(s["bias"]).lower()
                blobs = [next(weights) for _ in range(1 + s["bias"])]
                if kind == "linear":
                    inner = {**given, "axis": len(layer["before"])}
                    return self.add("InnerProduct", (x,), *blobs, inner_product_param=inner)
                return self.add("Convolution", (x,), *blobs, convolution_param={**given, **window(s)})
            case "batch_norm":
                x = self.add("BatchNorm", (x,), batch_norm_param={"eps": s["eps"]})
                return self.add(
                    "Scale", (x,), next(weights), next(weights), scale_param={"bias_term": "true"}
                )
            case "max_pool" | "avg_pool":
                return self.add("Pooling", (x,), pooling_param=pooling(layer))
            case "global_avg_pool":
                return self.add(
                    "Flatten",
                    (self.add("Pooling", (x,), pooling_param={"pool": "AVE", "global_pooling": "true"}),),
                )
            case "flatten":
                return self.add("Flatten", (x,))
            case "relu" | "sigmoid":
                return self.add("ReLU" if kind == "relu" else "Sigmoid", (x,), top=place)
            case "subsample":  # a 1 x 1 convolution that copies; new channels have zero weights
                copy = np.eye(s["out"], layer["before"][0])[:, :, None, None]
                given = {
                    "num_output": s["out"],
                    "bias_term": "false",
                    "kernel_size": 1,
                    "stride": s["stride"],
                }
                return self.add("Convolution", (x,), copy, frozen=True, convolution_param=given)
        raise NotImplementedError(f"this adapter has no layer of kind {kind}")


def window(s: dict[str, Any]) -> dict[str, Any]:
    """Return size, step and padding as Caffe names them."""
    return {"kernel_size": s["kernel"], "stride": s["stride"], "pad": s["padding"]}


def pooling(layer: Layer) -> dict[str, Any]:
    """Return a pooling's parameters; Caffe rounds the number of windows up, later versions down if asked."""
    s, average = layer["settings"], layer["kind"] == "avg_pool"
    if average and s["padding"]:
        raise NotImplementedError("Caffe's average counts the padding, and the description's does not")
    given = {"pool": "AVE" if average else "MAX", **window(s)}
    sides, after = layer["before"][1:], layer["after"][1:]
    if [windows(side, s, math.ceil) for side in sides] != list(after):
        given["round_mode"] = "FLOOR"
        if [windows(side, s, math.floor) for side in sides] != list(after):
            raise NotImplementedError(f"Caffe's windows on {sides} are not the description's {after}")
    return given


def windows(side: int, s: dict[str, Any], rounded: Any) -> int:
    """Return how many windows Caffe puts on a side; with padding, none begins behind the end."""
    count = int(rounded((side + 2 * s["padding"] - s["kernel"]) / s["stride"])) + 1
    return count - 1 if s["padding"] and (count - 1) * s["stride"] >= side + s["padding"] else count


def settings(given: dict[str, Any]) -> str:
    """Return protobuf's text of settings."""
    return "".join(f"{key}{' ' if str(value)[0] == '{' else ': '}{value} " for key, value in given.items())


def varint(number: int) -> bytes:
    """Return protobuf's bytes of a number: seven bits each, the lowest first."""
    return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])


def field(number: int, payload: bytes) -> bytes:
    """Return protobuf's bytes of a field that has a length."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def model(blobs: dict[str, list[Any]]) -> Iterator[bytes]:
    """Yield a NetParameter: layers (field 100) by name (1), with blobs (7) of a shape (7, 1) and data (5)."""
    for name, arrays in blobs.items():
        held = field(1, name.encode())
        for array in arrays:
            shape = field(7, field(1, b"".join(map(varint, array.shape))))
            held += field(7, shape + field(5, array.astype("<f4").tobytes()))
        yield field(100, held)


def fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield number and bytes of each field of a message that has a length; others are skipped."""
    position = 0

    def number() -> int:
        nonlocal position
        value, shift = 0, 0
        while True:
            byte = data[position]
            position, value, shift = position + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while position < len(data):
        key = number()
        length = number() if key & 7 in (0, 2) else 0
        length = {0: 0, 1: 8, 2: length, 5: 4}[key & 7]
        if key & 7 == 2:
            yield key >> 3, data[position : position + length]
        position += length


def trained_sizes(data: memoryview, trained: set[str]) -> Iterator[int]:
    """Yield the size of each blob of the named layers of a NetParameter."""
    for number, layer in fields(data):
        parts = list(fields(layer)) if number == 100 else []
        if any(part == 1 and bytes(value).decode() in trained for part, value in parts):
            for blob in (value for part, value in parts if part == 7):
                yield from (len(values) // 4 for inner, values in fields(blob) if inner == 5)
