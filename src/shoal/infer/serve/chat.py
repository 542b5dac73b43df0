"""How the messages of a chat become a prompt: by the tokenizer's own template, or as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.data.chat import read_chat
from shoal.data.tokenizer import Tokenizer
from shoal.infer.serve.render import render

PLAIN_STOPS = ("\nUser:", "\nSystem:")


class Chat:
    """Turns messages into the tokens of a prompt; `stops` and `end_ids` end the answer to it."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        """Look for a template in a model's folder; an InputError names a file that holds no usable one."""
        self._tokenizer = tokenizer
        self._template, self._variables = read_chat(folder)
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
