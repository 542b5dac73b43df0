"""A page that stands alone: a template that extends `page.html`, with nothing from elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import InputError


@dataclass(frozen=True)
class Table:
    """A cell may have a remark on a second line; one that begins with * is the best of its row."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """A picture, below the sentence that it shows."""

    sentence: str
    data: str
    caption: str


Block = Table | Picture


def check_packages() -> None:
    """Raise an InputError where a report cannot be made."""
    lacking = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if lacking:
        raise InputError(f"a report needs {' and '.join(lacking)}", hint="pip install 'shoal[report]'")


def render(template: Path, **values: Any) -> str:
    """Fill in a template; what is not marked as safe is escaped."""
    check_packages()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(**values)
