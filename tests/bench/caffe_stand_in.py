"""A stand-in for the program `caffe`: reads its files by Caffe's rules, and prints what Caffe 1.0 does.

`python caffe_stand_in.py train --solver=FILE --weights=FILE`. A field that Caffe does not have ends it.
"""

import re
import struct
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

KNOWN = {  # fields of caffe.proto
    "solver": "net base_lr lr_policy momentum display max_iter snapshot_prefix snapshot_after_train "
    "debug_info solver_mode",
    "layer": "name type bottom top param inner_product_param convolution_param pooling_param "
    "batch_norm_param scale_param parameter_param",
    "param": "lr_mult",
    "parameter_param": "shape",
    "shape": "dim",
    "inner_product_param": "num_output bias_term axis",
    "convolution_param": "num_output bias_term kernel_size stride pad",
    "pooling_param": "pool kernel_size stride pad global_pooling",  # 1.0 has no round_mode
    "batch_norm_param": "eps",
    "scale_param": "bias_term",
}


def log(text, kind="I", place="solver.cpp:239"):
    micro = f"{time.time() % 1:.6f}"[2:]
    print(
        f"{kind}1124 {time.strftime('%H:%M:%S')}.{micro} 12345 {place}] {text}", file=sys.stderr, flush=True
    )


def check(good, text):
    if not good:
        log(f"Check failed: {text}", "F", "net.cpp:757")
        print(
            "*** Check failure stack trace: ***\n    @     0x7f0123456789  google::LogMessage::Fail()",
            file=sys.stderr,
        )
        sys.exit(134)


def parse(words, kind):
    """Read a message of protobuf's text up to its closing brace."""
    found = {}
    while words and (word := words.pop(0)) != "}":
        key = word.removesuffix(":")
        check(
            key in (f"{KNOWN[kind]} layer" if kind == "net" else KNOWN[kind]).split(),
            f'no field named "{key}"',
        )
        value = words.pop(0)
        found.setdefault(key, []).append(parse(words, key) if value == "{" else value.strip('"'))
    return found


KNOWN["net"] = ""


def message(data):
    """Yield the fields of a binary message: number, value."""
    at = 0

    def number():
        nonlocal at
        end = at
        while data[end] > 127:
            end += 1
        value = sum((byte & 127) << 7 * place for place, byte in enumerate(data[at : end + 1]))
        at = end + 1
        return value

    while at < len(data):
        key = number()
        assert key & 7 == 2, "weights have only names, shapes and data"
        size = number()
        yield key >> 3, data[at : at + size]
        at += size


def numbers(data):
    while data:
        end = next(place for place, byte in enumerate(data) if byte < 128)
        yield sum((byte & 127) << 7 * place for place, byte in enumerate(data[: end + 1]))
        data = data[end + 1 :]


def read_weights(path):
    held = {}
    for field, layer in message(Path(path).read_bytes()):
        assert field == 100
        (name,) = (value.decode() for number, value in message(layer) if number == 1)
        held[name] = []
        for blob in (dict(message(value)) for number, value in message(layer) if number == 7):
            shape = list(numbers(dict(message(blob[7]))[1]))
            held[name].append(torch.tensor(np.frombuffer(blob[5], "<f4").reshape(shape)))
    return held


def prefixed(number, payload):
    size, out = len(payload), b""
    while size > 127:
        out, size = out + bytes([size & 127 | 128]), size >> 7
    key = number << 3 | 2
    head = bytes([key]) if key < 128 else bytes([key & 127 | 128, key >> 7])
    return head + out + bytes([size]) + payload


def write_snapshot(prefix, step, layers, blobs):
    text = b""
    for layer in layers:
        held = prefixed(1, layer["name"][0].encode()) + prefixed(2, layer["type"][0].encode())
        held += b"\x50\x00" + b"\x2d" + struct.pack("<f", 1.0)  # phase, loss_weight: fields without a length
        for blob in blobs.get(layer["name"][0], []):
            held += prefixed(7, prefixed(5, blob.detach().numpy().astype("<f4").tobytes()))
        text += prefixed(100, held)
    for suffix, content in (("caffemodel", text), ("solverstate", b"")):
        Path(f"{prefix}_iter_{step}.{suffix}").write_bytes(content)


def one(found, key, default):
    return type(default)(found.get(key, [default])[0])


def pooled(x, p):
    kernel, stride, pad = (
        one(p, key, default) for key, default in (("kernel_size", 1), ("stride", 1), ("pad", 0))
    )
    if "global_pooling" in p:
        return functional.avg_pool2d(x, x.shape[-2:])
    check(p["pool"][0] == "MAX" or not pad, "this stand-in has no average with padding")
    window = {
        "kernel_size": kernel,
        "stride": stride,
        "padding": pad,
        "ceil_mode": True,
    }  # its size is rounded up
    return functional.max_pool2d(x, **window) if p["pool"][0] == "MAX" else functional.avg_pool2d(x, **window)


def forward(layers, blobs):
    held = {}
    for layer in layers:
        kind, name = layer["type"][0], layer["name"][0]
        bottoms, own = [held[bottom] for bottom in layer.get("bottom", [])], blobs.get(name, [])
        p = next((layer[key][0] for key in layer if key.endswith("_param")), {})
        x = bottoms[0] if bottoms else None
        if kind == "Parameter":
            dims = [int(size) for size in p["shape"][0]["dim"]]
            out = own[0] if own else torch.zeros(dims)
            check(list(out.shape) == dims, f"Cannot copy param 0 weights from layer '{name}'; shape mismatch")
        elif kind == "InnerProduct":
            x = x.flatten(one(p, "axis", 1))
            check(own[0].shape == (one(p, "num_output", 0), x.shape[-1]), f"shape mismatch of layer '{name}'")
            out = functional.linear(x, *own)
        elif kind == "Convolution":
            shape = (one(p, "num_output", 0), x.shape[1], *[one(p, "kernel_size", 0)] * 2)
            check(
                own[0].shape == shape and len(own) == 1 + (p["bias_term"] == ["true"]), f"shape of '{name}'"
            )
            out = functional.conv2d(x, *own, stride=one(p, "stride", 1), padding=one(p, "pad", 0))
        elif kind == "BatchNorm":
            mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
            out = (x - mean) / (var + one(p, "eps", 1e-5)).sqrt()
        elif kind == "Scale":
            out = x * own[0][:, None, None] + own[1][:, None, None]
        elif kind == "Pooling":
            out = pooled(x, p)
        elif kind == "Eltwise":
            out = bottoms[0] + bottoms[1]
        elif kind == "SoftmaxWithLoss":
            out = functional.cross_entropy(x, bottoms[1].long())
        else:
            out = {"Flatten": lambda x: x.flatten(1), "ReLU": torch.relu, "Sigmoid": torch.sigmoid}[kind](x)
        held[layer["top"][0]] = out
    return out


def main(words):
    given = dict(word.removeprefix("--").split("=", 1) for word in words[1:])
    tokens = re.compile(r'"[^"]*"|[{}]|[^\s{}]+')
    solver = {
        key: value[0]
        for key, value in parse(tokens.findall(Path(given["solver"]).read_text()), "solver").items()
    }
    layers = parse(tokens.findall(Path(solver["net"]).read_text()), "net")["layer"]
    blobs, velocity = read_weights(given["weights"]), {}
    frozen = {layer["name"][0] for layer in layers if layer.get("param") == [{"lr_mult": ["0"]}]}
    weights = [blob.requires_grad_() for name, held in blobs.items() if name not in frozen for blob in held]
    for step in range(int(solver["max_iter"])):
        start = time.perf_counter()
        loss = forward(layers, blobs)
        gradients = torch.autograd.grad(loss, weights)
        if solver["debug_info"] == "true":
            norms = [float(torch.cat([g.flatten() for g in held]).norm()) for held in (weights, gradients)]
            shown = f"L1 norm = (1, 2); L2 norm = ({norms[0]:.6g}, {norms[1]:.6g})"
            log(f"    [Backward] All net params (data, diff): {shown}", "E", "net.cpp:721")
        took = time.perf_counter() - start
        log(f"Iteration {step} ({1 / took:.6g} iter/s, {took:.6g}s/1 iters), loss = {loss:.6g}")
        log(
            f"    Train net output #0: SoftmaxWithLoss9 = {loss:.6g} (* 1 = {loss:.6g} loss)",
            place="solver.cpp:258",
        )
        log(f"Iteration {step}, lr = {solver['base_lr']}", place="sgd_solver.cpp:112")
        for number, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            moved = float(solver["base_lr"]) * gradient
            velocity[number] = velocity.get(number, 0) * float(solver["momentum"]) + moved
            weight.data -= velocity[number]
    if solver["snapshot_after_train"] == "true":
        write_snapshot(solver["snapshot_prefix"], solver["max_iter"], layers, blobs)
    log(f"Iteration {solver['max_iter']}, loss = {forward(layers, blobs):.6g}", place="solver.cpp:331")
    log("Optimization Done.", place="caffe.cpp:259")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
