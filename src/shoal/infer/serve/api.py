"""What a client of `shoal serve` may ask for, and the words of the answers, OpenAI's."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator

from shoal.errors import InputError
from shoal.infer import generate
from shoal.infer.generate import GeneratedRow
from shoal.infer.load import TextModel
from shoal.infer.sampling import Sampling

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_TEXTS = 64  # of one request
_NOT_DONE: dict[str, Any] = {  # values that change nothing are taken, for clients that send them all
    "best_of": 1,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "logprobs": False,
    "presence_penalty": 0.0,
    "suffix": "",
}

Text = Annotated[str, StringConstraints(strict=True)]
Stop = Annotated[str, StringConstraints(strict=True, max_length=1000)]
Token = Annotated[int, Field(ge=0, strict=True)]
_LIST = Field(min_length=1, fail_fast=True)  # or each of 100,000 wrong ids would get a sentence
Tokens = Annotated[list[Token], _LIST]


class StreamOptions(BaseModel):
    """What a stream holds beside its pieces."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class _Wish(BaseModel):
    """What all requests for text have in common; `top_k` is ours, a greedy choice is temperature 0."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    n: int | None = Field(None, ge=1, le=MAX_TEXTS)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: int | bool | None = None
    presence_penalty: float | None = None

    @field_validator(*_NOT_DONE, check_fields=False)
    @classmethod
    def _is_not_done(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        harmless = _NOT_DONE[info.field_name]
        if value is not None and (value != harmless or isinstance(value, bool) != isinstance(harmless, bool)):
            raise ValueError("not supported by this server; leave it out")
        return value

    @property
    def stops(self) -> list[str]:
        """Return the texts that end a completion."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def sampling(self) -> Sampling:
        """Return how tokens are chosen; without a seed, differently each time."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
        )


class CompletionRequest(_Wish):
    """The body of a request for completions."""

    prompt: Text | Tokens | Annotated[list[Text], _LIST] | Annotated[list[Tokens], _LIST] = ""
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def rows(self, loaded: TextModel, capacity: int) -> list[GeneratedRow]:
        """Return a row for each text, samples of a prompt beside each other.

        An InputError says which prompt does not fit into `capacity` tokens, or has an id there is not.
        """
        prompts, samples = self._prompts(), self.n or 1
        if len(prompts) * samples > MAX_TEXTS:
            raise InputError(
                f"{len(prompts)} prompts with n = {samples}: at most {MAX_TEXTS} texts a request"
            )
        vocab_size, rows = loaded.model.shape.vocab_size, []
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        for number, prompt in enumerate(prompts):
            tokens = loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            if unknown := [token for token in tokens if token >= vocab_size]:
                raise InputError(f"prompt {number} has the token {unknown[0]}: there are {vocab_size}")
            tokens = list(tokens) or [loaded.eod_id]
            if len(tokens) + max_tokens > capacity:
                raise InputError(
                    f"prompt {number} has {len(tokens)} tokens and max_tokens is {max_tokens}: "
                    f"together at most {capacity}"
                )
            rows += [GeneratedRow(tokens, max_tokens, number, sample) for sample in range(samples)]
        return rows

    def _prompts(self) -> list[str | list[int]]:
        one_alone = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("list[str | list[int]]", [self.prompt] if one_alone else self.prompt)


class Part(BaseModel):
    """A part of a message; only text can be read."""

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """What somebody said in a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[Part]

    def plain(self) -> dict[str, str]:
        """Return it as chat templates know it: "system" is what OpenAI calls "developer" now."""
        text = self.content if isinstance(self.content, str) else "".join(one.text for one in self.content)
        return {"role": self.role.replace("developer", "system"), "content": text}


class ChatRequest(_Wish):
    """The body of a request for the next message of a chat."""

    messages: Annotated[list[Message], _LIST]
    max_completion_tokens: int | None = Field(None, ge=1)  # the newer name of max_tokens

    def as_completion(self, prompt: list[int], stops: Sequence[str], capacity: int) -> CompletionRequest:
        """Return the request for a completion that this comes down to, by default of at most 256 tokens."""
        room = min(generate.DEFAULT_MAX_TOKENS, max(1, capacity - len(prompt)))
        shared = {name: getattr(self, name) for name in _Wish.model_fields}
        shared["max_tokens"] = self.max_completion_tokens or self.max_tokens or room
        return CompletionRequest.model_construct(
            **{**shared, "stop": [*self.stops, *stops], "prompt": prompt}
        )


class TokenizeRequest(BaseModel):
    """The body of a request for the tokens of a prompt, as vLLM's servers have it."""

    model: str | None = None
    prompt: Text


class Answer:
    """The words of one answer: its pieces as they come, or all in one."""

    def __init__(self, model: str, *, chat: bool, stream: bool | None) -> None:
        self._field = "text" if not chat else "delta" if stream else "message"
        kind = "text_completion" if not chat else "chat.completion.chunk" if stream else "chat.completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def choice(self, index: int, text: str, finish: str | None, *, begins: bool = False) -> dict[str, Any]:
        """Return a text, or a piece of one; `finish` is "stop", "length", or None while there is more.

        What begins a message says whose it is.
        """
        message = {**({"role": "assistant"} if begins else {}), "content": text}
        held = text if self._field == "text" else message
        return {"index": index, self._field: held, "logprobs": None, "finish_reason": finish}

    def body(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        """Return the JSON object with some choices."""
        return {**self._head, "choices": choices, **({} if usage is None else {"usage": usage})}


def usage(num_prompt: int, num_completion: int) -> dict[str, int]:
    """Return the count of tokens."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def failure(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """Return the words of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
