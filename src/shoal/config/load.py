"""From a preset or TOML file plus overrides to a Config, and back to TOML."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from shoal.config.sections import Config
from shoal.errors import ConfigError, nearest

_MAX_TOML_BYTES = 1 << 20


def preset_names() -> list[str]:
    """List the configurations that come with Shoal."""
    folder = resources.files("shoal.presets")
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def load_config(source: str, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Config:
    """Load a preset by name or a TOML file by path, then apply overrides {section: {field: value}}."""
    path = Path(source)
    if path.suffix == ".toml" or path.is_file():
        values = _parse(read_toml(path), source)
    elif source in preset_names():
        values = _parse(
            resources.files("shoal.presets").joinpath(f"{source}.toml").read_text(), f"preset {source}"
        )
    else:
        raise ConfigError(
            f"{source!r} is neither a TOML file nor a preset", hint=nearest(source, preset_names())
        )
    merged = {**values}
    for section, fields in (overrides or {}).items():
        merged[section] = {**values.get(section, {}), **fields}
    return validate(merged, source)


def validate(values: Mapping[str, Any], source: str) -> Config:
    """Check raw values against the sections; `source` names where they came from."""
    _refuse_unknown(values, source)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            name = ".".join(str(part) for part in problem["loc"])
            lines.append(f"{name} = {problem['input']!r}: {problem['msg'].lower()}")
        raise ConfigError(f"{source}: " + "; ".join(lines)) from error


def config_from_toml(text: str, source: str) -> Config:
    """Read a stored configuration; `source` names it in errors."""
    return validate(_parse(text, source), source)


def to_toml(config: Config, *, given_only: bool = False) -> str:
    """Write every setting that is set as TOML; `config_from_toml` gives the same object back.

    `given_only` leaves out defaults that were not given: what reads the file may have better ones.
    """
    blocks = []
    for section, model in config:
        names = model.model_fields_set if given_only else type(model).model_fields
        lines = [
            f"{name} = {toml_value(value)}" for name, value in model if value is not None and name in names
        ]
        if lines:
            blocks.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def differences(config: Config, reference: Config) -> list[tuple[str, Any, Any]]:
    """List (name, value, reference value) for every setting in which two configurations differ."""
    return [
        (f"{section}.{name}", value, getattr(getattr(reference, section), name))
        for section, model in config
        for name, value in model
        if value != getattr(getattr(reference, section), name)
    ]


def read_toml(path: Path) -> str:
    """Return the text of a TOML file, of limited size."""
    try:
        if path.stat().st_size > _MAX_TOML_BYTES:
            raise ConfigError(f"{path} is larger than 1 MiB: not a configuration")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"configuration {path} cannot be read: {reason}") from error


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from error
    _refuse_unknown(values, source, text)
    return values


def line_of(text: str, *keys: str) -> str:
    """Return ", line N" of a key in a TOML file, given the sections around it first; "" if none is found."""
    lines, found = text.splitlines(), 0
    for key in keys:
        pattern = re.compile(rf"[\s\[\"']*{re.escape(key)}(?![\w-])")
        found = next((n for n in range(found + 1, len(lines) + 1) if pattern.match(lines[n - 1])), found)
    return f", line {found}" if found else ""


def _refuse_unknown(values: Mapping[str, Any], source: str, text: str = "") -> None:
    for section, fields in values.items():
        if section not in Config.model_fields:
            raise ConfigError(
                f"{source}{line_of(text, section)}: unknown section [{section}]",
                hint=nearest(section, Config.model_fields),
            )
        model = Config.model_fields[section].annotation
        assert isinstance(model, type), section
        assert issubclass(model, BaseModel), section
        if not isinstance(fields, Mapping):
            raise ConfigError(
                f"{source}: {section} must be a section: write [{section}] and its fields below"
            )
        for name in fields:
            if name not in model.model_fields:
                near = _in_another_section(name) or nearest(name, model.model_fields)
                where = f"{source}{line_of(text, section, name)}"
                raise ConfigError(f"{where}: unknown key {section}.{name}", hint=near)


def _in_another_section(name: str) -> str:
    """Return 'did you mean SECTION.name?' where such a setting exists."""
    found = next((section for section, fields in Config() if name in type(fields).model_fields), None)
    return f"did you mean {found}.{name}?" if found else ""


def toml_value(value: Any) -> str:
    """Return a setting as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c for c in escaped) + '"'
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return repr(value)
