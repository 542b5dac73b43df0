"""Train a GPT from raw text, on a laptop or a cluster.

In a notebook or a script: `prepare`, `train`, `read_metrics` and `load` of this package, explained in
`help("shoal.notebook")`. Each is loaded when it is first used: `import shoal` does not load torch.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["ShoalError", "load", "prepare", "read_metrics", "train"]


def __getattr__(name: str) -> Any:
    """Load what a notebook asks for (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    from shoal import notebook

    return getattr(notebook, name)


def __dir__() -> list[str]:
    return __all__


class _TrainPackage(ModuleType):
    """The package `shoal.train`, which can be called: a notebook's function has the same name."""

    @property
    def __call__(self) -> Callable[..., Any]:
        from shoal import notebook

        return notebook.train


import_module("shoal.train").__class__ = _TrainPackage  # the package's own file is empty
