"""A chat template comes from a stranger: rendered by Jinja's sandbox, in a process of its own with limits.

Processor time, memory and the size of the result are limited. The process starts in some 0.1 s, as it loads
this module alone: what numpy and the like map would also count against its memory.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

from shoal.errors import InputError

_MAX_PROMPT = 1 << 20  # characters of a rendered chat
_CPU_S, _MEMORY_BYTES = 2, 512 << 20
_WALL_S = 30  # of the whole process, on a machine that is busy
# -P: not the modules of the current folder, which may be the model's own.
_CHILD = [sys.executable, "-P", "-c", "from shoal.infer.serve.render import render_stdin; render_stdin()"]


def render(template: str, variables: dict[str, Any]) -> str:
    """Return what a template makes of its variables; an InputError has its own error, or names the limits."""
    order = json.dumps([template, variables])
    try:
        done = subprocess.run(  # in a session of its own, as Ctrl-C is not for it
            _CHILD,
            input=order,
            capture_output=True,
            text=True,
            start_new_session=True,
            timeout=_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"the chat template of this model took more than {_WALL_S} s") from None
    if done.returncode:
        raise InputError(
            f"the chat template of this model takes more than {_CPU_S} s or {_MEMORY_BYTES >> 20} MiB "
            "for these messages"
        )
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise InputError(f"the chat template of this model failed: {answer['error']}")
    return str(answer["text"])


def render_stdin() -> None:
    """Read [template, variables] as JSON from stdin; print {"text": ...} or {"error": ...}."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    sandbox = ImmutableSandboxedEnvironment(  # with what transformers gives a template
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
    sandbox.globals |= {"raise_exception": _object, "strftime_now": lambda how: datetime.now().strftime(how)}
    with suppress(ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it is at
    signal.setitimer(signal.ITIMER_PROF, _CPU_S)
    try:
        template, variables = json.load(sys.stdin)
        text = sandbox.from_string(template).render(variables)
        long = f"its text is longer than {_MAX_PROMPT:,} characters"
        answer = {"text": text} if len(text) <= _MAX_PROMPT else {"error": long}
    except Exception as error:  # whatever a template may raise
        answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    print(json.dumps(answer))


def _object(message: str) -> NoReturn:
    raise ValueError(message)
