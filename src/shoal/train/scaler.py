"""The loss scale of fp16 training: large enough for small gradients, lowered when large ones overflow.

The rule is Megatron-LM's of 2021: overflows halve the scale from the hysteresis-th on, a window of steps
without any doubles it and restores the hysteresis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.config.sections import Precision

_FACTOR = 2.0


@dataclass
class LossScaler:
    """The scale and the counters that move it, part of every checkpoint; 1 for good without fp16."""

    scale: float
    window: int
    hysteresis: int
    min_scale: float
    dynamic: bool
    forgiving: int  # overflows until the scale is halved
    clean: int = 0  # steps since the last overflow

    @classmethod
    def of(cls, settings: Precision, *, fp16: bool) -> LossScaler:
        """Make the scaler that the settings ask for."""
        fixed = settings.loss_scale or settings.initial_scale
        return cls(
            scale=fixed if fp16 else 1.0,
            window=settings.scale_window,
            hysteresis=settings.hysteresis,
            min_scale=settings.min_scale,
            dynamic=fp16 and settings.loss_scale is None,
            forgiving=settings.hysteresis,
        )

    def update(self, overflow: bool) -> bool:
        """Count a step; return whether it is to be left out. All ranks must pass the same verdict.

        An overflow that the scale cannot cure (fixed, or at its minimum) is nothing that this decides.
        """
        if not self.dynamic:
            return False
        curable = self.scale > self.min_scale
        if overflow:
            self._lower()
        else:
            self.clean += 1
            if self.clean % self.window == 0:
                self.forgiving = self.hysteresis
                self.scale *= _FACTOR
        return overflow and curable

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on alike."""
        return {"scale": self.scale, "forgiving": self.forgiving, "clean": self.clean}

    def load(self, state: dict[str, Any]) -> None:
        """Take over the state of a checkpoint; a fixed scale is the configuration's."""
        if self.dynamic:
            self.scale, self.forgiving = float(state["scale"]), int(state["forgiving"])
            self.clean = int(state["clean"])

    def _lower(self) -> None:
        self.clean = 0
        if self.forgiving > 1:
            self.forgiving -= 1
        else:
            self.scale = max(self.scale / _FACTOR, self.min_scale)
