"""What a committed checkpoint is: its folder's name, its manifest, and whether its files are what they were.

Nothing in here imports torch, trusts a file, or needs a process group.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from shoal.config.load import config_from_toml
from shoal.errors import CheckpointError, InputError, ShoalError, UnreadableError
from shoal.models.counts import count_parameters
from shoal.models.shape import ModelShape, resolve_shape
from shoal.runtime.files import MAX_JSON_BYTES, digest_of, hash_file, read_json, reading

FORMAT = "shoal-checkpoint-1"
MANIFEST = "manifest.json"
STATE = "state.json"
WEIGHTS = "model"  # the sub-folder that weights-only retention keeps
MAX_FILES = 1_000_000
_LEAST_LAYER_BYTES = 400  # of the names of its tensors
_STEP_FOLDER = re.compile(r"step-(\d{8,12})")
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"  # no leading dot: neither hidden nor ".."
_FILE_NAME = re.compile(rf"(?:{_PART}/)?{_PART}")


@dataclass(frozen=True)
class Manifest:
    """The list of a checkpoint's files; `files` maps a relative name to its size and xxh3-128 digest.

    Where hosts share no folder, each has a manifest of its own part, and `elsewhere` lists the files that
    other hosts keep: host -> name -> the same facts.
    """

    step: int
    files: dict[str, dict[str, Any]]
    world_size: int = 1
    weights_only: bool = False
    elsewhere: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    format: str = FORMAT

    def to_json(self) -> str:
        """Return the text of manifest.json; its own digest makes damage to the manifest visible too."""
        content = asdict(self)
        return json.dumps({**content, "digest": digest_of(content)}, indent=1) + "\n"

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all listed files."""
        return sum(entry["size_bytes"] for entry in self.files.values())


def file_entry(path: Path) -> dict[str, Any]:
    """Return a file's size and digest, as the manifest lists them."""
    return {"size_bytes": path.stat().st_size, "xxh3_128": hash_file(path)}


def is_file_name(name: object) -> bool:
    """Say whether `name` may stand in a manifest: one file, at most one folder deep, nothing hidden."""
    return isinstance(name, str) and len(name) < 200 and _FILE_NAME.fullmatch(name) is not None


def step_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step that a folder name stands for, or None where it is not a checkpoint's name."""
    match = _STEP_FOLDER.fullmatch(path.name)
    return int(match[1]) if match else None


def committed(folder: Path) -> list[Path]:
    """Return what has a checkpoint's name in a checkpoints folder, newest first, verified or not.

    Links count, too. A folder that cannot be listed is an UnreadableError: nothing may be made in its place.
    """
    with reading(folder):
        if _mode(folder) is None:
            return []
        paths = [folder / name for name in os.listdir(folder)]
    found = [(step, path) for path in paths if (step := step_of(path)) is not None]
    return [path for _, path in sorted(found, reverse=True)]


def read_plain_json(path: Path, what: str) -> Any:
    """Read a JSON file that must be an ordinary file: a link or a pipe from a stranger is refused."""
    with reading(path):
        is_plain = _is_plain(path)
    if not is_plain:
        raise CheckpointError(f"{what} {path} is missing or not an ordinary file")
    try:
        return read_json(path, what)
    except InputError as error:
        raise CheckpointError(error.message) from error


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and check manifest.json; anything but exactly our format is a CheckpointError."""
    content = read_plain_json(checkpoint / MANIFEST, "checkpoint manifest")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{checkpoint / MANIFEST} is not a manifest of the format {FORMAT}")
    digest = content.pop("digest", None)
    if digest != digest_of(content):
        raise CheckpointError(f"{checkpoint / MANIFEST} was damaged or edited: its digest does not fit")
    try:
        manifest = Manifest(**content)
    except TypeError as error:
        raise CheckpointError(f"{checkpoint / MANIFEST} has missing or unknown entries") from error
    _check_types(checkpoint, manifest)
    return manifest


def _check_types(checkpoint: Path, manifest: Manifest) -> None:
    lists = [manifest.files, *manifest.elsewhere.values()] if isinstance(manifest.elsewhere, dict) else [None]
    bad = not all(map(_is_file_list, lists))
    bad = bad or not isinstance(manifest.step, int) or not isinstance(manifest.weights_only, bool)
    bad = bad or not isinstance(manifest.world_size, int) or not isinstance(manifest.created, str)
    if bad:
        raise CheckpointError(f"{checkpoint / MANIFEST} lists files in a way that Shoal never writes")


def _is_file_list(files: object) -> bool:
    return (
        isinstance(files, dict)
        and len(files) <= MAX_FILES
        and all(map(is_file_name, files))
        and all(
            isinstance(entry, dict)
            and set(entry) == {"size_bytes", "xxh3_128"}
            and isinstance(entry["size_bytes"], int)
            and isinstance(entry["xxh3_128"], str)
            for entry in files.values()
        )
    )


def read_text(checkpoint: Path, name: str) -> str:
    """Return a small text file of a checkpoint, such as config.toml."""
    path = checkpoint / name
    with reading(path):
        if not _is_plain(path) or path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is missing, too large or not an ordinary file")
        try:
            return path.read_text(encoding="utf-8")
        except ValueError as error:
            raise CheckpointError(f"{path} is not text: {error}") from error


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the content of state.json."""
    state = read_plain_json(checkpoint / STATE, "checkpoint state")
    if not isinstance(state, dict):
        raise CheckpointError(f"{checkpoint / STATE} is not a JSON object")
    return state


def read_decoder(checkpoint: Path) -> tuple[ModelShape, int]:
    """Return the shape of the decoder in a checkpoint, and the id that ends a document."""
    state = read_state(checkpoint)
    config = config_from_toml(read_text(checkpoint, "config.toml"), str(checkpoint / "config.toml"))
    if config.model.network != "decoder":
        raise InputError(
            f"{checkpoint} holds the network {config.model.network}: only decoders generate text",
            hint="give a run of a GPT, such as `shoal train tiny` makes",
        )
    try:
        vocab_size, eod_id = int(state["vocab_size"]), int(state["eod_id"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"the state of checkpoint {checkpoint} has a missing or invalid entry: {error}"
        ) from error
    shape = resolve_shape(config.model, vocab_size)
    held = sum(file.stat().st_size for file in (checkpoint / WEIGHTS).glob("*"))
    refuse_imagined(shape, held - _LEAST_LAYER_BYTES * shape.n_layers, str(checkpoint))
    return shape, eod_id


def refuse_imagined(shape: ModelShape, held: int, where: str) -> None:
    """Refuse a shape of more numbers than the files hold, before anything is made of that size."""
    counts = count_parameters(shape)
    needed = counts.block_matrices + counts.positions + shape.vocab_size * shape.d_model
    if needed > held:
        size = f"{shape.n_layers} layers, {shape.d_model} wide, of {shape.vocab_size} ids"
        raise CheckpointError(
            f"{where}: {size} take more numbers than the files hold: {max(0, held):,} at most",
            hint="the configuration belongs to other files, or it was edited",
        )


def verify(checkpoint: Path, *, part: int = 0, parts: int = 1) -> list[str]:
    """Return what is wrong with a checkpoint, in sentences; nothing where it is as it was written.

    With `parts` > 1 only every `parts`-th file is read (ranks share the work); sizes are always checked.
    What cannot be read is an UnreadableError, and no damage: the error may pass.
    """
    try:
        with reading(checkpoint):
            return _problems(checkpoint, part, parts)
    except UnreadableError as error:
        with reading(checkpoint):
            if _mode(checkpoint) is None:  # retention took it meanwhile
                return [f"{checkpoint} is there no more"]
        raise error
    except ShoalError as error:
        return [error.message]


def _problems(checkpoint: Path, part: int, parts: int) -> list[str]:
    if checkpoint.is_symlink():
        checkpoint.stat()  # one that leads nowhere, to a disk that is not mounted perhaps
    manifest = read_manifest(checkpoint)
    problems = _wrong_step(checkpoint, manifest) + _extra_files(checkpoint, manifest)
    for index, (name, entry) in enumerate(sorted(manifest.files.items())):
        problems += check_file(checkpoint, name, entry, read=index % parts == part)
    return problems


def _wrong_step(checkpoint: Path, manifest: Manifest) -> list[str]:
    step = step_of(checkpoint)
    if step is None or step == manifest.step:
        return []
    return [f"the folder is called {checkpoint.name} but its manifest says step {manifest.step}"]


def _extra_files(checkpoint: Path, manifest: Manifest) -> list[str]:
    allowed = {MANIFEST, *manifest.files}
    # A kill may have come between the arrival of another host's files and the manifest that lists them.
    allowed |= {name for files in manifest.elsewhere.values() for name in files}
    allowed |= {name.split("/")[0] for name in allowed if "/" in name}
    # A hidden file beside the manifest is a leftover that nothing reads; in the folders every file counts.
    found = {path.name for path in checkpoint.iterdir() if not path.name.startswith(".")}
    found |= {str(path.relative_to(checkpoint)) for path in checkpoint.glob("*/*")}
    if manifest.weights_only:  # a kill may have come between the new manifest and the removal of the rest
        found = {name for name in found if name.split("/")[0] in {WEIGHTS, *manifest.files}}
    return [f"{name!r} is not in the manifest" for name in sorted(found - allowed)]


def check_file(checkpoint: Path, name: str, entry: dict[str, Any], *, read: bool = True) -> list[str]:
    """Return what is wrong with one listed file; `read` checks its digest and tensor header too."""
    with reading(checkpoint / name):
        return _check_file(checkpoint, name, entry, read=read)


def _check_file(checkpoint: Path, name: str, entry: dict[str, Any], *, read: bool) -> list[str]:
    path = checkpoint / name
    if not _is_plain(path) or (path.parent != checkpoint and path.parent.is_symlink()):
        return [f"{name} is missing or not an ordinary file"]
    if (size_bytes := path.stat().st_size) != entry["size_bytes"]:
        return [f"{name} has {size_bytes} bytes, the manifest says {entry['size_bytes']}"]
    if not read:
        return []
    if hash_file(path) != entry["xxh3_128"]:
        return [f"{name} was changed: its digest does not fit"]
    if path.suffix == ".safetensors":
        return _check_tensor_file(path, name)
    return []


def _check_tensor_file(path: Path, name: str) -> list[str]:
    try:
        with safe_open(path, framework="numpy"):  # checks header length, JSON, offsets and file size
            return []
    except SafetensorError as error:
        return [f"{name} is not a safetensors file: {error}"]
    except OSError:  # whatever the system said comes as "no such file", without a number
        path.open("rb").close()
        raise


def _is_plain(path: Path) -> bool:
    return stat.S_ISREG(_mode(path) or 0)


def _mode(path: Path) -> int | None:
    """Return what stands at a path, links not followed; None for nothing, an OSError where nobody knows."""
    try:
        return path.lstat().st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise


def resolve_checkpoint(path: Path) -> Path:
    """Return a verified checkpoint: `path` itself, or the newest good one of a run or checkpoints folder."""
    with reading(path):
        if not path.is_dir():
            raise InputError(f"{path} is not a folder", hint="give a run folder or a checkpoint folder")
        is_one = step_of(path) is not None or (path / MANIFEST).exists()
        is_run = (path / "checkpoints").exists()
    if is_one:
        if problems := verify(path):
            raise CheckpointError(
                f"checkpoint {path} is damaged: {describe(problems)}", hint="choose another one"
            )
        return _refuse_part(path)
    folder = path / "checkpoints" if is_run else path
    damaged = []
    for candidate in committed(folder):
        if not (problems := verify(candidate)):
            return _refuse_part(candidate)
        damaged.append(f"{candidate.name} is damaged: {describe(problems)}")
    detail = "; ".join(damaged) or "no folder step-NNNNNNNN in it"
    raise CheckpointError(
        f"{path} holds no good checkpoint: {detail}", hint="`shoal checkpoint ls` lists them"
    )


def missing_parts(manifests: list[Manifest]) -> list[str]:
    """Return one sentence for each host whose files are in none of the manifests of one step."""
    held = {name: entry for manifest in manifests for name, entry in manifest.files.items()}
    lacking: dict[str, set[str]] = {}
    for manifest in manifests:
        for host, files in manifest.elsewhere.items():
            absent = {name for name, entry in files.items() if held.get(name) != entry}
            lacking.setdefault(host, set()).update(absent)
    return [f"host {host} has {_some(sorted(names))}" for host, names in lacking.items() if names]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _refuse_part(checkpoint: Path) -> Path:
    if missing := missing_parts([read_manifest(checkpoint)]):
        raise CheckpointError(
            f"{checkpoint} is one host's part of a checkpoint: {'; '.join(missing)}",
            hint=f"copy their folder here, then: shoal checkpoint gather {checkpoint} FOLDER",
        )
    return checkpoint


def describe(problems: list[str]) -> str:
    """Return the first problems in one line."""
    more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more
