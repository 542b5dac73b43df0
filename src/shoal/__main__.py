"""The first thing that runs: signals are heard before anything is loaded."""

from __future__ import annotations

import signal
import sys

from shoal.runtime.startup import Stopped, install_stop_handlers


def main() -> None:
    """Run the `shoal` command; what a stop request interrupts ends with a sentence and 128 + the signal."""
    install_stop_handlers()
    try:
        from shoal.cli.app import main as run

        run()
    except BaseException as ended:
        if not Stopped.by or (isinstance(ended, SystemExit) and not ended.code):
            raise
        print(f"stopped by {Stopped.by}", file=sys.stderr)
        sys.exit(128 + signal.Signals[Stopped.by])


if __name__ == "__main__":
    main()
