"""What to do about a loss that is not finite or that spikes; inputs are global, so all ranks decide alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shoal.config.sections import Guard as GuardSettings
from shoal.errors import ShoalError
from shoal.runtime.files import append_json
from shoal.runtime.log import log

Action = Literal["go", "warn", "skip", "stop"]
_MEAN_DECAY = 0.98  # the running mean looks back some 50 steps
_MIN_STEPS = 20  # before that the loss falls too fast to call anything a spike


class LossGuard:
    """Judges each step by its loss and gradient norm and keeps the running mean of good losses."""

    def __init__(self, settings: GuardSettings, incidents: Path | None) -> None:
        self._settings = settings
        self._incidents = incidents  # None on all ranks but one
        self.mean = 0.0
        self.seen = 0

    def allows(self, step: int, loss: float, grad_norm: float, samples: np.ndarray) -> bool:
        """Say whether to take the optimiser step; raise ShoalError where the settings say stop.

        Anything odd goes into incidents.jsonl with the places in the run of the step's samples.
        """
        kind, action = self._judge(loss, grad_norm)
        if action == "go":
            self._learn(loss)
            return True
        self._report(
            {
                "step": step,
                "kind": kind,
                "action": action,
                "loss": repr(loss),
                "grad_norm": repr(grad_norm),
                "running_mean": self.mean,
                "samples": samples.tolist(),
            }
        )
        if action == "stop":
            raise ShoalError(
                f"step {step}: {kind} (loss {loss:g}, gradient norm {grad_norm:g}, "
                f"running mean {self.mean:g}); "
                f"the step was {'taken before it was judged' if self._settings.late else 'not taken'} and "
                "nothing was saved after the last committed checkpoint",
                hint="see incidents.jsonl for the samples; lower optimizer.lr, or set guard.nonfinite or "
                "guard.spike to skip, and run again to resume",
            )
        if action == "warn" and math.isfinite(loss):
            self._learn(loss)
        return action == "warn"

    def state(self) -> dict[str, float]:
        """Return what a resumed run needs to judge alike."""
        return {"mean": self.mean, "seen": self.seen}

    def load(self, state: dict[str, Any]) -> None:
        """Take over the state of a checkpoint."""
        self.mean, self.seen = float(state["mean"]), int(state["seen"])

    def _judge(self, loss: float, grad_norm: float) -> tuple[str, Action]:
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return "loss or gradient norm is not finite", self._settings.nonfinite
        factor = self._settings.spike_factor
        if factor and self.seen >= _MIN_STEPS and loss > factor * self.mean:
            return f"loss spiked above {factor:g} times its running mean", self._settings.spike
        return "", "go"

    def _learn(self, loss: float) -> None:
        self.seen += 1
        decay = min(_MEAN_DECAY, 1 - 1 / self.seen)
        self.mean = decay * self.mean + (1 - decay) * loss

    def _report(self, incident: dict[str, Any]) -> None:
        log.warning(f"step {incident['step']}: {incident['kind']}; guard: {incident['action']}")
        if self._incidents is not None:
            append_json(self._incidents, incident)
