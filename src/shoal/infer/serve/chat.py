"""How the messages of a chat become a prompt: by the tokenizer's own template, or as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.data.tokenizer import Tokenizer
from shoal.errors import InputError
from shoal.infer.serve.render import render
from shoal.runtime.files import read_json, reading

PLAIN_STOPS = ("\nUser:", "\nSystem:")
_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_MAX_TEMPLATE = 256 << 10  # characters


class Chat:
    """Turns messages into the tokens of a prompt; `stops` and `end_ids` end the answer to it."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        """Look for a template in a model's folder; an InputError names a file that holds no usable one."""
        self._tokenizer = tokenizer
        config = read_json(folder / _CONFIG, "the file") if (folder / _CONFIG).is_file() else {}
        self._template, self._variables = _template_of(folder, config), _special_tokens(config)
        self.stops: tuple[str, ...] = PLAIN_STOPS
        self.end_ids = frozenset[int]()
        if self._template is not None:
            ends = tokenizer.encode_with_specials(self._variables.get("eos_token", ""))
            self.stops, self.end_ids = (), frozenset(ends if len(ends) == 1 else [])

    def tokens(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the prompt that an assistant's answer follows; each message has "role" and "content"."""
        if self._template is not None:
            variables = {**self._variables, "messages": messages, "add_generation_prompt": True}
            return self._tokenizer.encode_with_specials(render(self._template, variables))
        said = [f"{one['role'].capitalize()}: {one['content'].strip()}\n" for one in messages]
        return self._tokenizer.encode("".join(said) + "Assistant:")


def _template_of(folder: Path, config: Any) -> str | None:
    """Return the template of a folder: a file of its own, or an entry, which may be a list of named ones."""
    found = config.get("chat_template") if isinstance(config, dict) else None
    if (folder / _TEMPLATE).is_file():
        with (
            reading(folder / _TEMPLATE),
            (folder / _TEMPLATE).open(encoding="utf-8", errors="replace") as file,
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
            hint=f"remove chat_template from {_CONFIG}, and {_TEMPLATE}, to serve without it",
        )
    return found


def _special_tokens(config: Any) -> dict[str, str]:
    """Return bos_token, eos_token and the like; each is a text, or an object that holds it."""
    entries = config.items() if isinstance(config, dict) else ()
    texts = {key: one.get("content") if isinstance(one, dict) else one for key, one in entries}
    return {key: text for key, text in texts.items() if key.endswith("_token") and isinstance(text, str)}
