"""What a client of `shoal serve` may ask for, and the words of the answers: OpenAI's completions."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator

from shoal.errors import InputError
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


class CompletionRequest(BaseModel):
    """The body of a request for completions; `top_k` is ours, a greedy choice is temperature 0."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    prompt: Text | Tokens | Annotated[list[Text], _LIST] | Annotated[list[Tokens], _LIST] = ""
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    n: int | None = Field(None, ge=1, le=MAX_TEXTS)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: int | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    best_of: int | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: int | bool | None = None
    presence_penalty: float | None = None
    suffix: str | None = None

    @field_validator(*_NOT_DONE)
    @classmethod
    def _is_not_done(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        harmless = _NOT_DONE[info.field_name]
        if value is not None and (value != harmless or isinstance(value, bool) != isinstance(harmless, bool)):
            raise ValueError("this server does not do that; leave it out")
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


class Answer:
    """The words of one answer: its pieces as they come, or all in one."""

    def __init__(self, model: str) -> None:
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def body(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        """Return the JSON object with some choices."""
        return {**self._head, "choices": choices, **({} if usage is None else {"usage": usage})}


def choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    """Return a text, or a piece of one; `finish` is "stop", "length", or None while there is more."""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


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
