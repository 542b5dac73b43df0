"""Number formats in which gradients are sent. A codec encodes a flat tensor as bytes and decodes it.

Values that are not finite decode as not finite, so that all ranks see an overflow.
"""

from __future__ import annotations

import math
import sys
from typing import Protocol

import torch
from torch import Tensor

assert sys.byteorder == "little", "bytes are packed in this order"


class Codec(Protocol):
    """A number format."""

    block: int  # values that are encoded together, with one scale
    feedback: float  # share of the error that is added to the next values; 0: no error feedback

    def num_bytes(self, numel: int) -> int:
        """Return the bytes that `numel` values take."""

    def encode(self, values: Tensor) -> Tensor:
        """Return the bytes of a flat tensor."""

    def decode(self, coded: Tensor, into: Tensor) -> None:
        """Decode bytes into a flat tensor."""


class Plain:
    """Values in their own format."""

    block = 1
    feedback = 0.0

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def num_bytes(self, numel: int) -> int:
        return self._dtype.itemsize * numel

    def encode(self, values: Tensor) -> Tensor:
        return values.view(torch.uint8)

    def decode(self, coded: Tensor, into: Tensor) -> None:
        into.copy_(coded.view(self._dtype))


class Bf16:
    """bfloat16. Rounding to nearest is unbiased, so there is no error feedback."""

    block = 1
    feedback = 0.0

    def num_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor) -> Tensor:
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, coded: Tensor, into: Tensor) -> None:
        into.copy_(coded.view(torch.bfloat16))


class Int8:
    """Integers from -127 to 127 with one fp32 scale a block, the block's largest magnitude / 127.

    Needs error feedback: a value below 1/254 of its block's largest always rounds to 0. Under Adam, which
    divides by the usual size of a gradient, its weight would never be updated.
    """

    feedback = 1.0

    def __init__(self, block: int) -> None:
        self.block = block

    def num_bytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block) + numel

    def encode(self, values: Tensor) -> Tensor:
        parts = _blocks(values, self.block)
        scales = [torch.linalg.vector_norm(part, math.inf, dim=1).float() / 127 for part in parts]
        codes = [
            (part / torch.where(scale == 0, 1, scale).to(part.dtype).unsqueeze(1)).round_().view(-1)
            for part, scale in zip(parts, scales, strict=True)
        ]
        return torch.cat(
            [
                torch.cat(scales).view(torch.uint8),
                torch.cat(codes).clamp_(-127, 127).to(torch.int8).view(torch.uint8),
            ]
        )

    def decode(self, coded: Tensor, into: Tensor) -> None:
        scales, codes = coded.split([coded.numel() - into.numel(), into.numel()])
        into.copy_(codes.view(torch.int8))
        _scale(into, scales.view(torch.float32).to(into.dtype), self.block)


class OneBit:
    """The sign of each value, with one bf16 scale a block: the mean of the block's magnitudes.

    All values of a block decode to the same magnitude. Large values therefore leave an error for many steps,
    and small ones become noise. Short blocks lose less. With 64 values a block, 20 % of the bytes are scales.

    Source: Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed
    training of speech DNNs" (2014), which uses two means for each column of a matrix.
    """

    def __init__(self, block: int, feedback: float = 1.0) -> None:
        self.block = block
        self.feedback = feedback

    def num_bytes(self, numel: int) -> int:
        return 2 * -(-numel // self.block) + -(-numel // 8)

    def encode(self, values: Tensor) -> Tensor:
        parts = _blocks(values, self.block)
        sizes = [torch.linalg.vector_norm(part, 1, dim=1) / part.shape[1] for part in parts]
        return torch.cat([torch.cat(sizes).bfloat16().view(torch.uint8), _pack(values >= 0)])

    def decode(self, coded: Tensor, into: Tensor) -> None:
        num_bits_bytes = -(-into.numel() // 8)
        scales, bits = coded.split([coded.numel() - num_bits_bytes, num_bits_bytes])
        signs = _signs(into)[bits.int()].view(-1)
        into.copy_(signs[: into.numel()])
        _scale(into, scales.view(torch.bfloat16).to(into.dtype), self.block)


def _blocks(values: Tensor, block: int) -> list[Tensor]:
    """View a flat tensor as [blocks, block], and the remainder as [1, less than a block]."""
    whole = values.numel() - values.numel() % block
    parts = [values[:whole].view(whole // block, block), values[whole:].view(1, -1)]
    return [part for part in parts if part.numel()] or parts[:1]


def _scale(values: Tensor, scales: Tensor, block: int) -> None:
    """Multiply each block by its scale, in place."""
    parts = _blocks(values, block)
    for part, of_part in zip(parts, scales.split([len(part) for part in parts]), strict=True):
        part.mul_(of_part.unsqueeze(1))


# Byte i of a word times 2^(56 - 7i) has its lowest bit at 56 + i; no two products share a bit below that.
_GATHER = sum(1 << (56 - 7 * bit) for bit in range(8))


def _pack(flags: Tensor) -> Tensor:
    """Pack eight flags into each byte, the first one in the lowest bit."""
    words = torch.nn.functional.pad(flags, (0, -flags.numel() % 8)).view(torch.int64)
    return (words * _GATHER).view(torch.uint8)[7::8]


def _signs(like: Tensor) -> Tensor:
    """Return the table [256, 8] of the signs that the bits of a byte encode: 1 for 1, -1 for 0."""
    bits = torch.arange(256, device=like.device).unsqueeze(1) >> torch.arange(8, device=like.device)
    return ((bits & 1) * 2 - 1).to(like.dtype)
