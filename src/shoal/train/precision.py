"""The number format of matrix products: fp32, or bf16 or fp16 under autocast with fp32 weights."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from shoal.config.sections import Precision as Settings
from shoal.runtime.device import resolve_dtype
from shoal.train.scaler import LossScaler

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Precision:
    """The format that the settings mean on a device, and the loss scale that fp16 needs."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.dtype = resolve_dtype(settings.dtype, device)
        self.scaler = LossScaler.of(settings, fp16=self.dtype == torch.float16)
        self._device_type = device.type

    @property
    def name(self) -> str:
        """The format as the settings spell it."""
        return _NAMES[self.dtype]

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass."""
        return torch.autocast(self._device_type, dtype=self.dtype, enabled=self.dtype != torch.float32)
