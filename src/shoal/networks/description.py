"""Networks described without a framework: layers in TOML, with their shapes, parameters and multiply-adds.

A description is a TOML file with a title, its sources, and a list of layers in the order of the forward pass:

    title = "LeNet-like network"
    input = [1, 28, 28]      # channels, height, width; or [features]; or tokens = N, a sequence of ids
    classes = 10             # outputs of a last layer with out = "classes"

    [[layers]]
    kind = "conv"
    out = 6
    kernel = 5

`KINDS` lists what each kind of layer reads. A layer with `body` repeats other layers: `residual` adds their
output to its input, or to that of `shortcut`; `repeat` runs them `times` times, with weights of their own.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import xxhash

from shoal.config.load import line_of, read_toml
from shoal.errors import ConfigError, nearest

CLASSES = "classes"  # as `out` of the last layer: as many as the task has
_MAX_SIZE = 1 << 20  # of a layer, in any direction
_MAX_LAYERS = 10_000
_MAX_DEPTH = 32  # of layers in layers
_MAX_PARAMETERS = 1 << 38
Shape = tuple[int, ...]  # of one sample: channels, height, width; steps, features; or features


@dataclass(frozen=True)
class _Field:
    """A setting of a layer: its default (None: it must be given) and smallest value."""

    default: int | float | bool | None = None
    least: int = 1


_OUT = _Field()
_WINDOW = {"kernel": _Field(), "stride": _Field(1), "padding": _Field(0, 0)}
_POOL = _WINDOW | {"ceil": _Field(False)}
KINDS: dict[str, dict[str, _Field]] = {
    "linear": {"out": _OUT, "bias": _Field(True), "gain": _Field(1.0, 0)},
    "conv": {"out": _OUT, **_WINDOW, "bias": _Field(True)},
    "batch_norm": {"eps": _Field(1e-5, 0), "momentum": _Field(0.1, 0)},
    "max_pool": _POOL,
    "avg_pool": _POOL,
    "global_avg_pool": {},
    "flatten": {},
    "relu": {},
    "sigmoid": {},
    "embedding": {"out": _OUT, "positions": _Field(False)},
    "unembedding": {},
    "attention": {"heads": _OUT},
    "layer_norm": {"eps": _Field(1e-5, 0)},
    "gelu": {},
    "lstm": {"out": _OUT, "layers": _Field(1)},
    "subsample": {"out": _OUT, "stride": _Field(1)},
    "residual": {},
    "repeat": {"times": _Field()},
}
_LISTS = {"residual": ("body", "shortcut"), "repeat": ("body",)}


@dataclass(frozen=True)
class Layer:
    """A layer with all its settings, and the shapes of one sample before and after it."""

    kind: str
    name: str  # of its weights, joined with dots
    settings: Mapping[str, Any] = field(default_factory=dict)
    body: tuple[Layer, ...] = ()
    shortcut: tuple[Layer, ...] = ()
    before: Shape = ()
    after: Shape = ()

    @property
    def path(self) -> str:
        """Path of its module in a network; dots divide it."""
        return self.name.replace("/", "_")

    @property
    def num_parameters(self) -> int:
        """Trainable numbers; an LSTM has two bias vectors, as in cuDNN and PyTorch."""
        s: Mapping[str, int] = self.settings
        own = sum(layer.num_parameters for layer in (*self.body, *self.shortcut))
        match self.kind:
            case "linear":
                return (self.before[-1] + s["bias"]) * self.after[-1]
            case "conv":
                return (self.before[0] * s["kernel"] ** 2 + s["bias"]) * self.after[0]
            case "batch_norm":
                return 2 * self.before[0]
            case "layer_norm":
                return 2 * self.before[-1]
            case "embedding":
                return (s["ids"] + s["positions"] * self.before[0]) * self.after[-1]
            case "attention":  # of queries, keys and values, and of the output
                return 4 * self.before[-1] * (self.before[-1] + 1)
            case "lstm":
                return sum(4 * s["out"] * (inner + s["out"] + 2) for inner in self.lstm_inputs)
        return own

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of matrix products and convolutions in the forward pass of one sample."""
        s: Mapping[str, int] = self.settings
        own = sum(layer.multiply_adds for layer in (*self.body, *self.shortcut))
        match self.kind:
            case "linear" | "unembedding":
                return math.prod(self.before) * self.after[-1]
            case "attention":  # of all pairs of steps, as torch counts them
                return self.before[0] * self.before[1] * (4 * self.before[1] + 2 * self.before[0])
            case "conv":
                return math.prod(self.after) * self.before[0] * int(s["kernel"]) ** 2
            case "lstm":
                return self.before[0] * sum(4 * s["out"] * (inner + s["out"]) for inner in self.lstm_inputs)
        return own

    @property
    def lstm_inputs(self) -> list[int]:
        """Features that enter each layer of an LSTM."""
        return [self.before[-1], *[self.settings["out"]] * (self.settings["layers"] - 1)]


@dataclass(frozen=True)
class Description:
    """A network as its file has it, without the sizes that follow from data."""

    name: str
    title: str
    source: str
    input: Shape  # of one sample; () for tokens
    tokens: int  # in a sample; 0 where samples are not token ids
    classes: int
    layers: tuple[Layer, ...]
    lines: Mapping[str, int] = field(default_factory=dict)  # of each layer of the list, in the file

    def resolve(self, shape: Shape | None = None, classes: int | None = None) -> Resolved:
        """Work out all shapes for samples of `shape` and a number of classes, by default the file's own.

        Raises:
            ConfigError: A layer does not fit the output of the one before it.
        """
        shape = shape if shape is not None else self.input or (self.tokens,)
        classes = classes or self.classes
        layers, after = self._chain(self.layers, shape, classes)
        resolved = Resolved(self.name, self.title, shape, classes, bool(self.tokens), layers)
        if after != ((*shape, classes) if self.tokens else (classes,)):
            raise ConfigError(
                f"{self.name}: the network ends in an output of {_words(after)} for {classes} classes",
                hint='let it end in a linear layer with out = "classes"',
            )
        if resolved.num_parameters > _MAX_PARAMETERS:
            raise ConfigError(f"{self.name}: {resolved.num_parameters:,} parameters are more than 2^38")
        return resolved

    def _chain(self, layers: Sequence[Layer], shape: Shape, classes: int) -> tuple[tuple[Layer, ...], Shape]:
        done = []
        for layer in layers:
            layer = self._resolve(layer, shape, classes)
            shape = layer.after
            done.append(layer)
        return tuple(done), shape

    def _resolve(self, layer: Layer, shape: Shape, classes: int) -> Layer:
        body, after = self._chain(layer.body, shape, classes)
        shortcut, added = self._chain(layer.shortcut, shape, classes)
        settings = dict(layer.settings)
        if settings.get("out") == CLASSES:
            settings["out"] = classes
        if layer.kind in ("embedding", "unembedding"):
            if not self.tokens:
                raise self._error(layer, "it takes token ids, and the input of this network is not tokens")
            settings["ids"] = classes
            sizes = [one.settings["out"] for one in self.layers if one.kind == "embedding"]
            if layer.kind == "unembedding" and sizes != [*shape[1:]]:
                raise self._error(
                    layer, f"it needs an embedding of {shape[-1]} features, whose weights it takes"
                )
        if layer.kind == "residual" and after != added:
            raise self._error(layer, f"its body gives {_words(after)}, its shortcut {_words(added)}")
        if not layer.body:
            try:
                after = _after(layer.kind, settings, shape)
            except ValueError as error:
                raise self._error(layer, str(error)) from None
        return replace(layer, settings=settings, body=body, shortcut=shortcut, before=shape, after=after)

    def _error(self, layer: Layer, what: str) -> ConfigError:
        top = layer.name.split("/")[0]
        line = next((f", line {line}" for name, line in self.lines.items() if name == top), "")
        return ConfigError(f"{self.name}{line}: layer {layer.name} ({layer.kind}): {what}")


@dataclass(frozen=True)
class Resolved:
    """A network with all its sizes."""

    name: str
    title: str
    input: Shape  # of one sample
    classes: int
    is_tokens: bool
    layers: tuple[Layer, ...]

    @property
    def num_parameters(self) -> int:
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def multiply_adds(self) -> int:
        """Of one sample, forward."""
        return sum(layer.multiply_adds for layer in self.layers)

    @property
    def digest(self) -> str:
        """Digest of all layers with their sizes."""
        return xxhash.xxh3_64_hexdigest(repr(self.layers).encode())

    @property
    def targets(self) -> int:
        """Predictions for one sample: one, or one a token."""
        return self.input[0] if self.is_tokens else 1


def names() -> list[str]:
    """List the networks that come with Shoal."""
    folder = resources.files("shoal.networks")
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def read(source: str) -> Description:
    """Read a description: the name of one that comes with Shoal, or a TOML file.

    Raises:
        ConfigError: There is none of that name, or the file does not describe a network.
    """
    path = Path(source)
    if source in names():
        text = resources.files("shoal.networks").joinpath(f"{source}.toml").read_text(encoding="utf-8")
    elif path.suffix == ".toml":
        text = read_toml(path)
    else:
        raise ConfigError(
            f"{source!r} is neither a network nor a TOML file that describes one",
            hint=nearest(source, names()),
        )
    return parse(text, source)


def parse(text: str, source: str) -> Description:
    """Read the text of a description; `source` names it in errors."""
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from error
    starts = [n for n, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*layers\s*\]\]", line)]
    allowed = ("title", "source", "input", "tokens", "classes", "layers")
    for name in values:
        if name not in allowed:
            raise ConfigError(
                f"{source}{line_of(text, name)}: unknown key {name}", hint=nearest(name, allowed)
            )
    sample, tokens, classes = values.get("input", []), values.get("tokens", 0), values.get("classes", 0)
    if (
        not _is_size(classes)
        or not _is_size(tokens, 0)
        or not isinstance(sample, list)
        or not values.get("layers")
    ):
        raise ConfigError(f"{source}: classes, layers, and input or tokens must be given", hint=_EXAMPLE)
    if bool(sample) == bool(tokens) or len(sample) > 3 or not all(map(_is_size, sample)):
        raise ConfigError(
            f"{source}{line_of(text, 'input' if sample else 'tokens')}: input = {sample}, tokens = {tokens}",
            hint="give input = [channels, height, width] or [features], or tokens = N",
        )
    reader = _Reader(source, starts)
    layers = tuple(reader.layers(values["layers"], "", starts))
    _refuse_same_names(source, layers)
    words = {key: str(values.get(key, "")) for key in ("title", "source")}
    return Description(
        source, words["title"], words["source"], tuple(sample), tokens, classes, layers, reader.lines
    )


def _refuse_same_names(source: str, layers: Sequence[Layer]) -> None:
    """Refuse a name that another layer has, or whose part before a dot another layer has."""
    taken, outer = set[str](), set[str]()
    for layer in layers:
        words = layer.path.split(".")
        before = {".".join(words[:number]) for number in range(1, len(words))}
        if layer.path in taken or layer.path in outer or before & taken:
            raise ConfigError(
                f"{source}: the name {layer.name} is that of two layers, or of a layer and of a group",
                hint="give each layer a name of its own; one without a name has its number, from 0",
            )
        taken.add(layer.path)
        outer |= before


_EXAMPLE = 'such as classes = 10, input = [3, 32, 32] and [[layers]] with kind = "conv"'


class _Reader:
    """Reads layers, and knows where in the file each of the list begins."""

    def __init__(self, source: str, starts: Sequence[int]) -> None:
        self._source, self._starts, self._count = source, starts, 0
        self.lines: dict[str, int] = {}

    def layers(self, values: Any, prefix: str, starts: Sequence[int] = ()) -> Iterator[Layer]:
        """Yield checked layers; those of `repeat` as often as it says."""
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{self._source}: {prefix or 'layers'} must be a list of layers", hint=_EXAMPLE)
        if prefix.count("/") > 2 * _MAX_DEPTH:  # two for each layer around these
            raise ConfigError(f"{self._source}: layers are nested more than {_MAX_DEPTH} deep")
        for number, given in enumerate(values):
            line = starts[number] if number < len(starts) else 0
            yield from self._layer(given, prefix, number, line)

    def _layer(self, given: Any, prefix: str, number: int, line: int) -> Iterator[Layer]:
        where = f"{self._source}{f', line {line}' if line else ''}: layer {prefix}{number}"
        if not isinstance(given, dict) or given.get("kind") not in KINDS:
            kind = given.get("kind") if isinstance(given, dict) else given
            raise ConfigError(f"{where}: unknown kind {kind!r}", hint=nearest(str(kind), KINDS))
        kind, lists = given["kind"], _LISTS.get(given["kind"], ())
        settings = self._settings(where, kind, given, lists)
        name = f"{prefix}{given.get('name', number)}"
        self.lines.setdefault(name.split("/")[0], line)
        self._count += 1
        if self._count > _MAX_LAYERS:
            raise ConfigError(f"{self._source}: more than {_MAX_LAYERS:,} layers")
        if kind == "repeat":
            for turn in range(settings["times"]):
                yield from self.layers(given.get("body"), f"{name}/{turn}/")
            return
        body, shortcut = (
            tuple(self.layers(given.get(part), f"{name}/{part}/")) if part in lists and need else ()
            for part, need in (("body", True), ("shortcut", "shortcut" in given))
        )
        yield Layer(kind, name, settings, body, shortcut)

    def _settings(self, where: str, kind: str, given: dict[str, Any], lists: Sequence[str]) -> dict[str, Any]:
        fields = KINDS[kind]
        for key in given.keys() - {"kind", "name", *lists, *fields}:
            raise ConfigError(
                f"{where} ({kind}): unknown key {key}", hint=nearest(key, [*fields, *lists, "name"])
            )
        if not re.fullmatch(r"(?=.{1,40}\Z)[a-z0-9_]+(\.[a-z0-9_]+)*", str(given.get("name", "0"))):
            raise ConfigError(f"{where}: name = {given['name']!r}", hint="use a-z, 0-9, _ and .")
        settings = {}
        for key, rule in fields.items():
            value = given.get(key, rule.default)
            if not (_fits(value, rule) or (key == "out" and kind == "linear" and value == CLASSES)):
                least = f"at least {rule.least}" if not isinstance(rule.default, bool) else "true or false"
                raise ConfigError(f"{where} ({kind}): {key} = {value!r}", hint=f"give a number, {least}")
            settings[key] = value
        return settings


def _is_size(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MAX_SIZE


def _fits(value: Any, rule: _Field) -> bool:
    if isinstance(rule.default, bool):
        return isinstance(value, bool)
    if isinstance(rule.default, float):
        return isinstance(value, int | float) and not isinstance(value, bool) and rule.least < value <= 1e6
    return _is_size(value, rule.least)


def _after(kind: str, settings: Mapping[str, Any], shape: Shape) -> Shape:
    """Return the shape after a layer without a body; a ValueError says what it would need."""
    match kind:
        case "linear" | "lstm":
            wanted = 2 if kind == "lstm" else len(shape)
            _need(shape, wanted, 2 if kind == "lstm" else 1, "steps and features")
            return (*shape[:-1], settings["out"])
        case "embedding":
            _need(shape, 1, 1, "token ids")
            return (*shape, settings["out"])
        case "attention" | "unembedding":
            _need(shape, 2, 2, "steps and features")
            if shape[1] % settings.get("heads", 1):
                raise ValueError(f"its {settings['heads']} heads do not divide {shape[1]} features")
            return (shape[0], settings.get("ids", shape[1]))
        case "flatten":
            return (math.prod(shape),)
        case "relu" | "sigmoid" | "gelu" | "layer_norm":
            return shape
    _need(shape, 3, 3, "channels, height and width")
    channels, *sides = shape
    match kind:
        case "batch_norm":
            return shape
        case "global_avg_pool":
            return (channels,)
        case "subsample":
            if settings["out"] < channels:
                raise ValueError(f"it adds channels: out is below the {channels} of its input")
            return (settings["out"], *(-(-side // settings["stride"]) for side in sides))
    kernel, stride, padding = (settings[name] for name in ("kernel", "stride", "padding"))
    if kind != "conv" and 2 * padding > kernel:
        raise ValueError(f"a padding of {padding} is more than half the kernel, {kernel}")
    sides = [_windows(side, kernel, stride, padding, up=settings.get("ceil", False)) for side in sides]
    if min(sides) < 1:
        raise ValueError(f"its kernel of {kernel} is larger than its input, {_words(shape)}")
    return (settings.get("out", channels), *sides)


def _need(shape: Shape, dims: int, least: int, what: str) -> None:
    if len(shape) != dims or dims < least:
        raise ValueError(f"it takes {what}, and its input is {_words(shape)}")


def _windows(side: int, kernel: int, stride: int, padding: int, *, up: bool) -> int:
    """Return the number of windows along a side; `up`: one may reach beyond the end, not begin there."""
    room = side + 2 * padding - kernel
    count = (-(-room // stride) if up else room // stride) + 1
    return count - 1 if up and (count - 1) * stride >= side + padding else count


def _words(shape: Shape) -> str:
    return " x ".join(map(str, shape))
