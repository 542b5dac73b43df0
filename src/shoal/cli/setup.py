"""`shoal config`, `shoal completion`: what one sets up once."""

from __future__ import annotations

from typing import Literal


def config(source: str | None = None, /) -> None:
    """Print a complete configuration as commented TOML.

    Example: shoal config tiny > my.toml   (edit it, then: shoal train my.toml --data DATASET)

    Parameters
    ----------
    source
        Preset (tiny, gpt2, llama-160m, ...) or TOML file (default: the default of every setting).
    """
    from shoal.config.load import load_config, to_commented_toml, validate

    resolved = load_config(source) if source else validate({}, "defaults")
    print(to_commented_toml(resolved), end="")


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a script that completes commands and options in a shell.

    Example: shoal completion bash > ~/.local/share/bash-completion/completions/shoal

    Example: shoal completion zsh > ~/.zfunc/_shoal   (a folder of your fpath)

    Example: shoal completion fish > ~/.config/fish/completions/shoal.fish

    Parameters
    ----------
    shell
        Shell to complete in.
    """
    from shoal.cli.app import app

    print(app.generate_completion(prog_name="shoal", shell=shell), end="")
