"""The number format of matrix products: fp32, or bf16 under autocast with fp32 weights."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from shoal.runtime.device import resolve_dtype


class Precision:
    """The format that `precision.dtype` means on a device."""

    def __init__(self, setting: str, device: torch.device) -> None:
        self.dtype = resolve_dtype(setting, device)
        self._device_type = device.type

    @property
    def name(self) -> str:
        return "bf16" if self.dtype == torch.bfloat16 else "fp32"

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass."""
        return torch.autocast(self._device_type, dtype=self.dtype, enabled=self.dtype != torch.float32)
