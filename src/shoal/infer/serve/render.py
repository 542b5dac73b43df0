"""A chat template comes from a stranger: rendered by Jinja's sandbox, in a process of its own with limits.

Processor time, memory and the size of the result are limited; a process that exceeds them is replaced. It
loads this module alone: what numpy and the like map would count against its memory.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import NoReturn

from shoal.errors import InputError

_MAX_PROMPT = 1 << 20  # characters of a rendered chat
_CPU_S, _MEMORY_BYTES = 2.0, 512 << 20
_CHILD = [sys.executable, "-c", "from shoal.infer.serve.render import render_lines; render_lines()"]

Messages = Sequence[dict[str, str]]  # each has "role" and "content"


class Renderer:
    """Renders one template in a child process, which lives until this process ends."""

    def __init__(self, template: str, variables: dict[str, str]) -> None:
        self._template, self._variables = template, variables
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def render(self, messages: Messages) -> str:
        """Return the text of a chat; an InputError has the template's own error, or the limit it exceeded."""
        order = json.dumps([self._template, {**self._variables, "messages": messages}])
        with self._lock:
            if self._child is None:
                self._child = _start()
            line = _ask(self._child, order)
            if not line:
                self._child.communicate()
                self._child = None
                raise InputError(
                    f"the chat template of this model takes more than {_CPU_S:g} s or "
                    f"{_MEMORY_BYTES >> 20} MiB for these messages"
                )
        answer = json.loads(line)
        if "error" in answer:
            raise InputError(f"the chat template of this model failed: {answer['error']}")
        return str(answer["text"])


def _start() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(_CHILD, stdin=pipe, stdout=pipe, text=True, start_new_session=True)  # no Ctrl-C


def _ask(child: subprocess.Popen[str], order: str) -> str:
    """Return the line that answers another; an empty one if the child has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    with suppress(BrokenPipeError):
        print(order, file=child.stdin, flush=True)
        return child.stdout.readline()
    return ""


def render_lines() -> None:
    """Answer lines of stdin, each [template, variables] in JSON, with {"text": ...} or {"error": ...}."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    sandbox = ImmutableSandboxedEnvironment(  # with what transformers gives a template
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
    sandbox.globals |= {"raise_exception": _object, "strftime_now": lambda how: datetime.now().strftime(how)}
    with suppress(ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it is at
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, _CPU_S)
        try:
            template, variables = json.loads(line)
            text = sandbox.from_string(template).render(variables, add_generation_prompt=True)
            long = f"its text is longer than {_MAX_PROMPT:,} characters"
            answer = {"text": text} if len(text) <= _MAX_PROMPT else {"error": long}
        except Exception as error:  # whatever a template may raise
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _object(message: str) -> NoReturn:
    raise ValueError(message)
