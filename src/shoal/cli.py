"""The `shoal` command: arguments and help only. Handlers import what they need, so that --help is instant."""

from __future__ import annotations

import sys
from pathlib import Path

from cyclopts import App, Parameter

from shoal.errors import EXIT_DONE, EXIT_STOPPED, ShoalError

app = App(
    name="shoal",
    help="Raw text to a trained GPT, from a laptop to many machines, and the run is never lost.",
    version_flags=["--version"],
    default_parameter=Parameter(consume_multiple=True, negative_iterable=()),
)
app.command("shoal.cli_train:train", name="train", help="Train a GPT; run the same command again to resume.")


@app.command
def doctor(*, json: Path | None = None) -> int:
    """Check this machine: Python, torch, cores, memory, disk, a two-process start; say what to do.

    Example: shoal doctor --json doctor.json

    Parameters
    ----------
    json
        Write the findings to this file, too.
    """
    from shoal.doctor import doctor as run

    return run(json)


def main() -> None:
    """Run one command; an error becomes a sentence on stderr and an exit status."""
    try:
        status = app(result_action="return_value")
    except ShoalError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(EXIT_STOPPED)
    except BrokenPipeError:  # `shoal ... | head`
        sys.stderr.close()
        sys.exit(EXIT_DONE)
    sys.exit(status if isinstance(status, int) else EXIT_DONE)
