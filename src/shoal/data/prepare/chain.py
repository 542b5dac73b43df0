"""The chain of stages of a preparation: which stages run, in which order, with which settings."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from shoal.data.prepare.stages.documents import StageSettings
from shoal.errors import ConfigError, InputError, nearest

WEB = "web.toml"  # the chain of --web, beside this module
_HERE = "shoal.data.prepare"
BEFORE = {  # the text: in this order, if they are there
    "links": f"{_HERE}.web.links:Links",
    "urls": f"{_HERE}.web.urls:Urls",
    "fetch": f"{_HERE}.web.client:Fetch",
}
ROWS = {  # document by document: in the order of the file
    "extract": f"{_HERE}.stages.extract:Extract",
    "repair": f"{_HERE}.stages.repair:Repair",
    "language": f"{_HERE}.stages.language:Language",
    "length": f"{_HERE}.stages.length:Length",
    "quality": f"{_HERE}.stages.quality:Quality",
    "mask": f"{_HERE}.stages.mask:Mask",
}
AFTER = {  # with all documents in view: in this order, after those
    "dedup": f"{_HERE}.dedup.settings:DedupSettings",
    "decontaminate": f"{_HERE}.stages.decontaminate:Decontaminate",
}
STAGES = BEFORE | ROWS | AFTER
_PATHS = ("files", "domain_files", "extension_files", "against", "tokenizer")  # settings that name files
_MAX_BYTES = 1 << 20
Kind = TypeVar("Kind", bound=StageSettings)


@dataclass(frozen=True)
class Chain:
    """Settings of the stages by name, in the order in which they run."""

    stages: dict[str, StageSettings]

    @property
    def takes_pages(self) -> bool:
        """Tell whether web pages are extracted."""
        return "extract" in self.stages

    def get(self, kind: type[Kind]) -> Kind | None:
        """Return the settings of a stage, if it is in the chain."""
        found = self.stages.get(kind.name)
        return found if isinstance(found, kind) else None

    def or_default(self, kind: type[Kind]) -> Kind:
        """Return the settings of a stage, or its defaults."""
        return self.get(kind) or kind()

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the settings of the stages that work document by document, as plain values."""
        return {name: values for name, values in self.to_dict().items() if name in ROWS}

    @property
    def after_fetch(self) -> list[str]:
        """Return the names of the stages that documents go through, in order."""
        return [name for name in self.stages if name not in BEFORE]

    def resolved(self, say: Callable[[str], None]) -> Chain:
        """Return the chain with the settings that depend on what this machine has; call it once."""
        return Chain({name: _absolute(stage).resolved(say) for name, stage in self.stages.items()})

    def files(self) -> list[str]:
        """Return the files and datasets that settings name; another content gives another dataset."""
        found = [getattr(stage, name, ()) for stage in self.stages.values() for name in _PATHS]
        several = [(one,) if isinstance(one, str) else one for one in found]
        return [file for files in several for file in files if Path(file).exists()]

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the settings of all stages as plain values."""
        return {name: stage.model_dump(mode="json") for name, stage in self.stages.items()}


def read_chain(path: Path | None, changes: Mapping[str, Mapping[str, Any]]) -> Chain:
    """Read a TOML of stages, a table each; None is that of --web. `changes` replace settings by stage.

    A ConfigError names the file, and what is allowed.
    """
    source = path or Path(__file__).with_name(WEB)
    try:
        if source.stat().st_size > _MAX_BYTES:
            raise ConfigError(
                f"{source} is larger than {_MAX_BYTES >> 20} MiB", hint="it is no TOML of stages"
            )
        values = tomllib.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror}", hint="check its name") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{source} is not TOML: {error}", hint="see `shoal prepare --show-stages`"
        ) from error
    for name, more in changes.items():
        if name == "language" and name not in values and "keep" not in more:
            continue  # --kind is for the stages that are there
        if name not in values and name != "language":
            raise ConfigError(
                f"{source} has no stage {name}, whose {', '.join(more)} is given", hint=f"add [{name}] to it"
            )
        values[name] = {**_settings(name, values.get(name, {}), str(source)).model_dump(), **more}
    return _build(values, str(source))


def _absolute(stage: StageSettings) -> StageSettings:
    """Return settings with absolute paths: workers of a cluster have other current folders."""
    update: dict[str, Any] = {}
    for name in (name for name in _PATHS if name in type(stage).model_fields):
        value = getattr(stage, name)
        paths = [
            str(Path(one).absolute()) if Path(one).exists() else one
            for one in ([value] if isinstance(value, str) else value)
        ]
        update[name] = paths[0] if isinstance(value, str) else tuple(paths)
    return stage.model_copy(update=update)


def chain_of(values: Mapping[str, Mapping[str, Any]]) -> Chain:
    """Return the chain for what `to_dict` gave."""
    return _build(values, "the chain")


def stage_class(name: str) -> type[StageSettings]:
    """Return the settings class of a stage."""
    module, _, kind = STAGES[name].partition(":")
    found: type[StageSettings] = getattr(importlib.import_module(module), kind)
    return found


def _build(values: Mapping[str, Any], source: str) -> Chain:
    unknown = next((name for name in values if name not in STAGES), None)
    if unknown is not None:
        raise ConfigError(f"{source}: there is no stage {unknown!r}", hint=nearest(unknown, STAGES))
    rows = [name for name in values if name in ROWS]
    order = [*(n for n in BEFORE if n in values), *rows, *(n for n in AFTER if n in values)]
    if "extract" in rows and rows[0] != "extract":
        raise ConfigError(f"{source}: extract comes after {rows[0]}", hint="put [extract] before the others")
    return Chain({name: _settings(name, values[name], source) for name in order})


def _settings(name: str, values: Any, source: str) -> StageSettings:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: {name} is not a table", hint=f"write [{name}] and its settings below")
    kind = stage_class(name)
    for key in values:
        if key not in kind.model_fields:
            raise ConfigError(
                f"{source}: {name} has no setting {key!r}", hint=nearest(key, kind.model_fields)
            )
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join([name, *map(str, first["loc"])])
        raise ConfigError(
            f"{source}: {where} = {first['input']!r}: {first['msg']}",
            hint="; ".join((kind.model_fields[str(first["loc"][0])].description or "").split("\n"))
            if first["loc"]
            else "",
        ) from error
