"""Chat templates beside a tokenizer, and the texts of its special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.errors import InputError
from shoal.runtime.files import read_json, reading

CONFIG_NAME, TEMPLATE_NAME = "tokenizer_config.json", "chat_template.jinja"
_MAX_TEMPLATE = 256 << 10  # characters


def read_chat(folder: Path) -> tuple[str | None, dict[str, str]]:
    """Return the chat template in a model's folder, if any, and its special tokens by name.

    The template is a file of its own, or an entry of tokenizer_config.json, which may be a list of named
    ones (transformers' format). An InputError names a file that holds no usable one.
    """
    path = folder / CONFIG_NAME
    config = read_json(path, "the file") if path.is_file() else {}
    return _template_of(folder, config), _special_tokens(config)


def chat_files(folder: Path) -> dict[str, bytes]:
    """Return the files that give a copy of a model's folder the same chats; none without a template."""
    template, tokens = read_chat(folder)
    if template is None:
        return {}
    return {TEMPLATE_NAME: template.encode(), CONFIG_NAME: json.dumps(tokens, indent=1).encode()}


def _template_of(folder: Path, config: Any) -> str | None:
    found = config.get("chat_template") if isinstance(config, dict) else None
    if (folder / TEMPLATE_NAME).is_file():
        with (
            reading(folder / TEMPLATE_NAME),
            (folder / TEMPLATE_NAME).open(encoding="utf-8", errors="replace") as file,
        ):
            found = file.read(_MAX_TEMPLATE + 1)
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    if found is None:
        return None
    if not isinstance(found, str) or len(found) > _MAX_TEMPLATE:
        raise InputError(
            f"the chat template in {folder} is no text of at most {_MAX_TEMPLATE:,} characters",
            hint=f"remove chat_template from {CONFIG_NAME}, and {TEMPLATE_NAME}, to do without it",
        )
    return found


def _special_tokens(config: Any) -> dict[str, str]:
    """Return bos_token, eos_token and the like; each is a text, or an object that holds it."""
    entries = config.items() if isinstance(config, dict) else ()
    texts = {key: one.get("content") if isinstance(one, dict) else one for key, one in entries}
    return {key: text for key, text in texts.items() if key.endswith("_token") and isinstance(text, str)}
