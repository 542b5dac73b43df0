"""`shoal config`, `shoal completion`: what one sets up once."""

from __future__ import annotations

import inspect
import textwrap
from typing import Literal, get_args


def config(source: str | None = None, /) -> None:
    """Print a complete configuration as commented TOML.

    Edit the file, and give it to shoal train in place of a preset.

    Example: shoal config tiny > my.toml

    Parameters
    ----------
    source
        Preset (tiny, gpt2, llama-160m, ...) or TOML file (default: the defaults of all settings).
    """
    from shoal.config.load import load_config, to_toml
    from shoal.config.sections import Config

    config = load_config(source) if source else Config()
    given, defaults = _lines_of(to_toml(config)), _lines_of(to_toml(Config()))
    lines = [f"# {source or 'All defaults'}: every setting, for `shoal train FILE.toml`"]
    for section, fields in config:
        lines += ["", "", *_comment(inspect.getdoc(type(fields)) or ""), f"[{section}]"]
        for name, field in type(fields).model_fields.items():
            values = ", ".join(value for value in get_args(field.annotation) if isinstance(value, str))
            _, _, default = defaults.get((section, name), "").partition(" = ")
            text = (
                f"{field.description}{values and f' Values: {values}.'}{default and f' Default: {default}.'}"
            )
            lines += ["", *_comment(text), given.get((section, name), f"# {name} =")]
    print("\n".join(lines))


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a script that completes commands and options in a shell.

    Write it to a file that the shell loads; for zsh, in a folder of fpath.

    Example: shoal completion bash > ~/.local/share/bash-completion/completions/shoal

    Example: shoal completion zsh > ~/.zfunc/_shoal

    Example: shoal completion fish > ~/.config/fish/completions/shoal.fish

    Parameters
    ----------
    shell
        Shell that the script is for.
    """
    from shoal.cli.app import app

    print(app.generate_completion(prog_name="shoal", shell=shell), end="")


def _lines_of(toml: str) -> dict[tuple[str, str], str]:
    """Return the line of each setting, by section and name."""
    blocks = [block.splitlines() for block in toml.split("\n\n")]
    return {
        (heading.strip("[]"), line.partition(" = ")[0]): line for heading, *lines in blocks for line in lines
    }


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
