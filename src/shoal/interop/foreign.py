"""Checkpoints of other programs, opened but not loaded: names, shapes, and tensors one at a time.

Safetensors are mapped into memory, pickles (nanoGPT, Megatron, pytorch_model.bin) read by `pickles`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.checkpoint.manifest import refuse_imagined
from shoal.config.sections import Model
from shoal.errors import CheckpointError, InputError
from shoal.interop.hugging_face import model_of, read_config, weight_files
from shoal.interop.pickles import read_pickle
from shoal.interop.tables import EMBEDDINGS, Entry, Family, family_of, table
from shoal.models.decoder import Decoder
from shoal.models.shape import ModelShape, resolve_shape

_BUFFERS = re.compile(r".*(\.attn\.(masked_)?bias|\.rotary_emb\.inv_freq)")  # constants that some files hold
_TRACKER = "latest_checkpointed_iteration.txt"
_MAX_STEP = 1 << 53


@dataclass(frozen=True)
class Foreign:
    """A checkpoint of another program. `parts(name)` gives a tensor, from each of Megatron's ranks."""

    family: Family
    model: Model
    names: Mapping[str, tuple[int, ...]]  # of the first rank, with their shapes
    parts: Callable[[str], list[Tensor]]
    moments: Callable[[str, str], list[Tensor]] | None = None  # of a name and a key, such as exp_avg
    optimizer_step: int = 0
    step: int = 0
    eod_id: int | None = None
    tokenizer_folder: Path | None = None
    source: dict[str, Any] = field(default_factory=dict)  # what the lineage says of it

    @property
    def shape(self) -> ModelShape:
        """The resolved shape."""
        return resolve_shape(self.model, self.model.vocab_size)

    def entries(self) -> list[Entry]:
        """Return the table's entries; a CheckpointError names tensors that are missing or unknown."""
        self._refuse_imagined()
        entries = table(self.family, self.shape)
        if self.family == "nanogpt":  # may be without biases
            entries = [e for e in entries if e.theirs in self.names or not e.theirs.endswith(".bias")]
        wanted = {entry.theirs for entry in entries}
        missing = sorted(wanted - self.names.keys())
        tied = {"lm_head.weight"} if self.shape.tie_embeddings else set()
        unknown = sorted(name for name in self.names.keys() - wanted - tied if not _BUFFERS.fullmatch(name))
        if missing or unknown:
            parts = [f"lacks {', '.join(missing[:3])}"] if missing else []
            parts += [f"holds {', '.join(unknown[:3])}, which this kind of model has not"] if unknown else []
            raise CheckpointError(f"{self.source['path']} {' and '.join(parts)}")
        self._check_shapes(entries)
        return entries

    def _refuse_imagined(self) -> None:
        """Refuse sizes that no file of these tensors can have, before anything is made of that size."""
        path, shape = self.source["path"], self.shape
        if shape.n_layers > len(self.names):
            raise CheckpointError(f"{path} holds fewer tensors than {shape.n_layers} layers")
        held = sum(map(math.prod, self.names.values())) * int(self.source.get("model_parallel", 1))
        refuse_imagined(shape, held, path)

    def _check_shapes(self, entries: list[Entry]) -> None:
        shape, ranks = self.shape, self.source.get("model_parallel", 1)
        with torch.device("meta"):
            sizes = {name: list(weight.shape) for name, weight in Decoder(shape).named_weights().items()}
        for entry in entries:
            wanted = sizes[entry.ours[0]]
            if entry.ours[0] in EMBEDDINGS:
                wanted[0] = shape.vocab_size
            wanted[0] *= len(entry.ours)
            wanted = wanted[::-1] if entry.transposed else wanted
            found = list(self.names[entry.theirs])
            if self.family in ("megatron", "nanogpt") and entry.ours[0] in EMBEDDINGS:
                wanted[0] = max(wanted[0], found[0] * ranks)  # padded as its writer liked
            if entry.cut is not None:
                wanted[entry.cut] //= ranks
            if found != wanted:
                raise CheckpointError(
                    f"{entry.theirs} is {found} in {self.source['path']}; expected {wanted}"
                )


@dataclass(frozen=True)
class Told:
    """What a user says of files that do not hold it."""

    n_heads: int = 0
    vocab_size: int = 0
    iteration: int = 0

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if value < 0:
                raise InputError(f"--{name.replace('_', '-')} {value} is negative")


def open_foreign(path: Path, told: Told) -> Foreign:
    """Open a Hugging Face folder, nanoGPT's file, or a Megatron checkpoint of 2021, by what is there."""
    if path.is_file():
        return _open_nanogpt(path, told)
    if (path / "config.json").is_file():
        if told.n_heads or told.vocab_size:
            raise InputError(f"{path / 'config.json'} has heads and vocabulary: leave the options out")
        return _open_hugging_face(path)
    if path.is_dir() and ((path / _TRACKER).is_file() or _ranks_in(path)):
        return _open_megatron(path, told)
    raise InputError(
        f"{path} is not a checkpoint that can be imported",
        hint="give a Hugging Face folder (config.json and weights), nanoGPT's ckpt.pt, or Megatron's folder "
        f"({_TRACKER} or mp_rank_00)",
    )


def _open_hugging_face(folder: Path) -> Foreign:
    where = str(folder / "config.json")
    config = read_config(folder)
    model = model_of(config, where)
    held: dict[str, Callable[[], Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        found, get = _open_safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
        for name, shape in found.items():
            whole = name.startswith(
                ("transformer.", "model.", "lm_head.")
            )  # the first GPT-2 files leave it out
            full = name if whole else f"transformer.{name}"
            shapes[full], held[full] = shape, partial(get, name)
    eos = config.get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    return Foreign(
        family_of(resolve_shape(model, model.vocab_size)),
        model,
        shapes,
        lambda name: [held[name]()],
        eod_id=eos if isinstance(eos, int) and 0 <= eos < model.vocab_size else None,
        tokenizer_folder=folder,
        source={"format": "Hugging Face", "path": str(folder.resolve())},
    )


Reader = tuple[dict[str, tuple[int, ...]], Callable[[str], Tensor]]


def _open_safetensors(path: Path) -> Reader:
    try:
        file = safe_open(path, framework="pt")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}") from error
    return shapes, file.get_tensor


def _pickled(path: Path) -> Reader:
    return _tensors(read_pickle(path), path)


def _tensors(content: Any, path: Path, prefix: str = "") -> Reader:
    """Return shapes and a reader of tensors by name, without `prefix`; refuse anything else."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__} in place of tensors by name")
    for name, tensor in content.items():
        if not isinstance(name, str) or not _is_plain(tensor):
            raise CheckpointError(f"{path} holds {name!r}, which is not a plain tensor")
    named = {name.removeprefix(prefix): tensor for name, tensor in content.items()}
    return {name: tuple(tensor.shape) for name, tensor in named.items()}, named.__getitem__


def _step(content: Mapping[Any, Any], key: str, path: Path) -> int:
    """Return how many steps a file says it was trained for; 0 where it does not say."""
    value = content.get(key, 0)
    if not isinstance(value, int | float) or not 0 <= value < _MAX_STEP:
        raise CheckpointError(f"{path} has {key} = {str(value)[:50]}, which is no number of steps")
    return int(value)


def _is_plain(tensor: Any) -> bool:
    """Say whether this is a tensor whose every element is in the file: none is repeated, nor imagined."""
    return (
        isinstance(tensor, Tensor)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.nbytes <= tensor.untyped_storage().nbytes()
    )


def _open_nanogpt(path: Path, told: Told) -> Foreign:
    content = read_pickle(path)
    if not isinstance(content, dict) or not {"model", "model_args"} <= content.keys():
        raise CheckpointError(
            f"{path} is not nanoGPT's: it has no `model` and `model_args`",
            hint="give the ckpt.pt of its train.py, or a folder of Hugging Face's or Megatron's",
        )
    shapes, get = _tensors(content["model"], path, "_orig_mod.")
    args = content["model_args"]
    try:
        model = Model(
            style="gpt2",
            n_layers=args["n_layer"],
            d_model=args["n_embd"],
            n_heads=args["n_head"],
            max_seq_len=args["block_size"],
            vocab_size=told.vocab_size or args["vocab_size"],
            dropout=args.get("dropout", 0.0),
            attention_dropout=args.get("dropout", 0.0),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the model_args in {path} lack or garble {error}") from error
    foreign = Foreign(
        "nanogpt",
        model,
        shapes,
        lambda name: [get(name)],
        step=_step(content, "iter_num", path),
        source={"format": "nanoGPT", "path": str(path.resolve())},
    )
    return _with_moments(foreign, [content.get("optimizer")], path)


def _ranks_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("mp_rank_*/model_optim_rng.pt"))


def _open_megatron(path: Path, told: Told) -> Foreign:
    folder = path if _ranks_in(path) else _iteration(path, told.iteration)
    files = _ranks_in(folder)
    if [file.parent.name for file in files] != [
        f"mp_rank_{rank:02d}" for rank in range(len(files))
    ] or not files:
        raise CheckpointError(f"{folder} lacks some of mp_rank_00, mp_rank_01, ...")
    ranks = [read_pickle(file) for file in files]
    models = []
    for content, file in zip(ranks, files, strict=True):
        if not isinstance(content, dict) or "model" not in content:
            raise CheckpointError(f"{file} has no `model`", hint="is it Megatron-LM's of 2021?")
        if "checkpoint_version" in content:
            raise CheckpointError(
                f"{file} is of a later Megatron-LM, with another order of query, key and value"
            )
        models.append(_tensors(content["model"], file, "module."))
    shapes, _ = models[0]
    for other, file in zip(models[1:], files[1:], strict=True):
        if other[0] != shapes:
            raise CheckpointError(f"{file} has other tensors than {files[0]}")
    foreign = Foreign(
        "megatron",
        _megatron_model(shapes, len(files), told, folder),
        shapes,
        lambda name: [get(name) for _, get in models],
        step=_step(ranks[0], "iteration", files[0]),
        source={"format": "Megatron-LM 2021", "path": str(folder.resolve()), "model_parallel": len(files)},
    )
    return _with_moments(foreign, [content.get("optimizer") for content in ranks], folder)


def _iteration(path: Path, wanted: int) -> Path:
    try:
        latest = (path / _TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / _TRACKER} cannot be read: {error}") from error
    if wanted or re.fullmatch("[0-9]{1,15}", latest):
        return path / f"iter_{wanted or int(latest):07d}"
    if latest == "release":
        return path / "release"
    raise CheckpointError(f"{path / _TRACKER} names no iteration: {latest[:50]!r}")


def _megatron_model(shapes: Mapping[str, tuple[int, ...]], ranks: int, told: Told, folder: Path) -> Model:
    """Return the model section: from the shapes, and from what only the user knows."""
    try:
        rows, width = shapes["word_embeddings.weight"]
        positions, _ = shapes["position_embeddings.weight"]
        layers = 1 + max(
            int(match[1]) for name in shapes if (match := re.match(r"transformer\.layers\.(\d+)\.", name))
        )
        d_ff = shapes["transformer.layers.0.mlp.dense_h_to_4h.weight"][0] * ranks
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{folder} is no GPT-2 of Megatron-LM: {error} is not in it") from error
    if not told.n_heads or not told.vocab_size:
        raise InputError(
            f"{folder} does not say how many heads its {width} columns are, nor how many of its "
            f"{rows * ranks} rows are token ids",
            hint="give both: --n-heads N --vocab-size N (50257 with GPT-2's tokenizer)",
        )
    if told.vocab_size > rows * ranks:
        raise InputError(f"--vocab-size {told.vocab_size} is more than the {rows * ranks} rows of {folder}")
    return Model(
        style="gpt2",
        n_layers=layers,
        d_model=width,
        n_heads=told.n_heads,
        d_ff=d_ff,
        max_seq_len=positions,
        vocab_size=told.vocab_size,
    )


def _with_moments(foreign: Foreign, states: Sequence[Any], path: Path) -> Foreign:
    """Add Adam's moments where the files hold them, and the fp32 weights that training in fp16 keeps.

    Both programs number parameters alike: first all matrices, then biases and norms, in the order of modules.
    What does not fit that order in its shapes is left, and said.
    """
    if not all(isinstance(state, dict) for state in states):
        return foreign
    entries = foreign.entries()
    names = sorted((entry.theirs for entry in entries), key=lambda name: len(foreign.names[name]) != 2)
    held = [state.get("optimizer_state_dict", state) for state in states]
    adam = {
        key: [_in_order(names, _moments(state, key, len(names))) for state in held]
        for key in ("exp_avg", "exp_avg_sq")
    }
    half = [name for name in names if foreign.parts(name)[0].dtype == torch.float16]
    masters = [
        _in_order(half, _flat(state["fp32_from_fp16"])) for state in states if "fp32_from_fp16" in state
    ]

    def fits(parts: list[dict[str, Tensor]], wanted: list[str]) -> bool:
        return len(parts) == len(states) and all(
            part.keys() == set(wanted) and all(tuple(t.shape) == foreign.names[n] for n, t in part.items())
            for part in parts
        )

    def weights(name: str) -> list[Tensor]:
        return [part[name] for part in masters] if masters and name in masters[0] else foreign.parts(name)

    if masters and not fits(masters, half):
        raise CheckpointError(f"the fp32 weights in {path} do not fit its model")
    known = all(fits(parts, names) for parts in adam.values())
    return replace(
        foreign,
        parts=weights,
        moments=(lambda name, key: [part[name] for part in adam[key]]) if known else None,
        optimizer_step=next(_steps(held[0], path), foreign.step) if known else 0,
        source={**foreign.source, "optimizer": "imported" if known else "not in an order that is known"},
    )


def _in_order(names: Sequence[str], tensors: Sequence[Any]) -> dict[str, Tensor]:
    """Name what is listed; nothing where the list is of another length or holds anything but tensors."""
    fits = len(names) == len(tensors) and all(map(_is_plain, tensors))
    return dict(zip(names, tensors, strict=True)) if fits else {}


def _moments(state: Any, key: str, count: int) -> list[Any]:
    held = state.get("state") if isinstance(state, dict) else None
    if not isinstance(held, dict):
        return []
    return [one.get(key) if isinstance(one := held.get(n), dict) else None for n in range(count)]


def _flat(groups: Any) -> list[Any]:
    return [weight for group in groups for weight in group] if isinstance(groups, list) else []


def _steps(state: Mapping[str, Any], path: Path) -> Iterator[int]:
    """Yield how many steps an Adam has taken: of a parameter, or of a group in FusedAdam's layout."""
    groups = state.get("param_groups")
    for place in (*state["state"].values(), *(groups if isinstance(groups, list) else ())):
        if isinstance(place, dict) and "step" in place:
            step = place["step"]
            one = isinstance(step, Tensor) and step.numel() == 1
            yield _step({"step": step.item() if one else step}, "step", path)
