"""How a head's key or value vector lies in the cache: plain numbers, or fewer bits with the scales beside them.

A scale belongs to one vector of one token, or to a group of its elements: never to a block, nor to a tensor that grows.
So a token can be appended to a partly filled block without a look at its neighbours, what was written never changes,
and what a vector reads as does not depend on the batch that it was written in. Codes and scales of a vector are
neighbours, which keeps a block one piece of memory that can be copied, sent or given back as it lies.

Rounding is to the nearest, half to even. What shares a scale with NaN or an infinity reads back as no finite number at
all, so that nothing looks sound that is not; `fp8`, without scales, saturates an infinity and keeps NaN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_shim.errors import SettingsError
from engine_shim.reference.geometry import Geometry

FLOAT8 = torch.float8_e4m3fn  # 4 bits of exponent, 3 of mantissa; no infinity
FLOAT8_MOST = 448.0  # its largest number (Micikevicius et al., arXiv 2209.05433)
INT8_MOST = 127.0
INT4_LEVELS = 15
GROUP = 32
GROUP_MOST = 7.0
_SCALE_BYTES = 4  # float32
_ZERO_BITS = 0xF  # of a float32 scale's mantissa, where int4 keeps its zero point


@dataclass(frozen=True, slots=True)
class StoredFormat(ABC):
    """One format. Vectors are (..., head_dim); stored they are (..., `elements(head_dim)`) of dtype `element`."""

    name: str
    element: torch.dtype = torch.uint8

    def refusal(self, head_dim: int) -> str:
        """Why vectors of this size cannot be stored so, "" where they can."""
        return ""

    @abstractmethod
    def elements(self, head_dim: int) -> int:
        """Elements of the storage that one vector takes, scales included."""

    @abstractmethod
    def encode(self, vectors: Tensor) -> Tensor:
        """Vectors of any float dtype as they are stored."""

    @abstractmethod
    def decode(self, stored: Tensor, head_dim: int) -> Tensor:
        """What stored vectors read as: float32, or the plain dtype that they are stored in."""

    def vector_bytes(self, head_dim: int) -> int:
        """Bytes of one head's key or value of one token."""
        return self.elements(head_dim) * self.element.itemsize

    def token_bytes(self, geometry: Geometry) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * geometry.layers * geometry.kv_heads * self.vector_bytes(geometry.head_dim)


class Plain(StoredFormat):
    """A float dtype as it is."""

    def elements(self, head_dim: int) -> int:
        return head_dim

    def encode(self, vectors: Tensor) -> Tensor:
        return vectors.to(self.element)

    def decode(self, stored: Tensor, head_dim: int) -> Tensor:
        return stored


class Float8(StoredFormat):
    """e4m3 with one scale for the whole cache, which is 1: what engines do without a calibration. Saturates at 448."""

    def elements(self, head_dim: int) -> int:
        return head_dim

    def encode(self, vectors: Tensor) -> Tensor:
        return vectors.float().clamp(-FLOAT8_MOST, FLOAT8_MOST).to(FLOAT8).view(torch.uint8)

    def decode(self, stored: Tensor, head_dim: int) -> Tensor:
        return stored.view(FLOAT8).float()


class Float8Scaled(StoredFormat):
    """e4m3 with a float32 scale for each head and token: the largest element becomes 448.

    |error| ≤ |element| / 16, or scale / 1024 where that is more: half a step of the format.
    """

    def elements(self, head_dim: int) -> int:
        return head_dim + _SCALE_BYTES

    def encode(self, vectors: Tensor) -> Tensor:
        vectors = vectors.float()
        scales = _largest(vectors) / FLOAT8_MOST
        # The quotient of the largest element can round to above 448, which would be NaN.
        codes = _quotients(vectors, scales).clamp(-FLOAT8_MOST, FLOAT8_MOST).to(FLOAT8)
        return torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), dim=-1)

    def decode(self, stored: Tensor, head_dim: int) -> Tensor:
        return stored[..., :head_dim].view(FLOAT8).float() * _floats(stored[..., head_dim:])


class Int8(StoredFormat):
    """-127 … 127 with a float32 scale for each head and token: the largest element becomes 127.

    |error| ≤ scale / 2.
    """

    def elements(self, head_dim: int) -> int:
        return head_dim + _SCALE_BYTES

    def encode(self, vectors: Tensor) -> Tensor:
        vectors = vectors.float()
        scales = _largest(vectors) / INT8_MOST
        codes = _quotients(vectors, scales).round().clamp(-INT8_MOST, INT8_MOST).to(torch.int8)
        return torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), dim=-1)

    def decode(self, stored: Tensor, head_dim: int) -> Tensor:
        return stored[..., :head_dim].view(torch.int8).float() * _floats(stored[..., head_dim:])


class Int4(StoredFormat):
    """16 levels over the range of a head's vector and zero, two codes a byte.

    The float32 scale keeps the zero point, 0 … 15, in the lowest 4 bits of its mantissa, as vLLM's int4_per_token_head
    does; without that one's random rotation before. Value = (code - zero) * scale, |error| ≤ scale / 2.
    """

    def elements(self, head_dim: int) -> int:
        return -(-head_dim // 2) + _SCALE_BYTES

    def encode(self, vectors: Tensor) -> Tensor:
        vectors = vectors.float()
        low, high = vectors.amin(-1, keepdim=True).clamp(max=0.0), vectors.amax(-1, keepdim=True).clamp(min=0.0)
        rough = high / INT4_LEVELS - low / INT4_LEVELS
        rounded = ((rough.view(torch.int32) + _ZERO_BITS) & ~_ZERO_BITS).view(torch.float32)  # up: the range must fit
        scales = torch.where(rough.isfinite(), rounded, rough)
        zeros = _quotients(-low, scales).round().clamp(0, INT4_LEVELS)
        codes = (_quotients(vectors, scales).round() + zeros).clamp(0, INT4_LEVELS).to(torch.uint8)
        kept = (scales.view(torch.int32) | zeros.to(torch.int32)).view(torch.uint8)
        return torch.cat((_pack(codes), kept), dim=-1)

    def decode(self, stored: Tensor, head_dim: int) -> Tensor:
        packed = -(-head_dim // 2)
        kept = _floats(stored[..., packed:]).view(torch.int32)
        scales, zeros = (kept & ~_ZERO_BITS).view(torch.float32), (kept & _ZERO_BITS).float()
        return (_unpack(stored[..., :packed])[..., :head_dim].float() - zeros) * scales


class GroupedInt4(StoredFormat):
    """-7 … 7, two codes a byte, with a float16 scale for each 32 elements of a head's vector: 4.5 bits in all.

    |error| ≤ scale / 2 where the scale is a normal float16; smaller ones have absolute steps of 2^-24 themselves, so
    that it can be 7 of these more.
    """

    def refusal(self, head_dim: int) -> str:
        return "" if head_dim % GROUP == 0 else f"{self.name} needs heads of a multiple of {GROUP}, not of {head_dim}"

    def elements(self, head_dim: int) -> int:
        return head_dim // 2 + 2 * (head_dim // GROUP)

    def encode(self, vectors: Tensor) -> Tensor:
        groups = _grouped(vectors.float())
        scales = (_largest(groups) / GROUP_MOST).to(torch.float16)
        codes = _quotients(groups, scales.float()).round().clamp(-GROUP_MOST, GROUP_MOST) + GROUP_MOST
        packed = _pack(codes.to(torch.uint8).flatten(-2))
        return torch.cat((packed, scales.squeeze(-1).view(torch.uint8)), dim=-1)

    def decode(self, stored: Tensor, head_dim: int) -> Tensor:
        packed = head_dim // 2
        scales = stored[..., packed:].contiguous().view(torch.float16).float()
        groups = _grouped(_unpack(stored[..., :packed]).float()) - GROUP_MOST
        return (groups * scales[..., None]).flatten(-2)


STORED_FORMATS: dict[str, StoredFormat] = {
    one.name: one
    for one in (
        Plain("float16", torch.float16),
        Plain("bfloat16", torch.bfloat16),
        Plain("float32", torch.float32),
        Float8("fp8"),
        Float8Scaled("fp8_per_token_head"),
        Int8("int8"),
        Int4("int4"),
        GroupedInt4("int4_group32"),
    )
}


def stored_format(name: str, head_dim: int) -> StoredFormat:
    """The format of that name for heads of this size; SettingsError says what there is, or what does not fit."""
    found = STORED_FORMATS.get(name)
    if found is None:
        raise SettingsError(f"KV dtype {name!r} is not known; use one of {', '.join(STORED_FORMATS)}")
    if refusal := found.refusal(head_dim):
        raise SettingsError(f"{refusal}; use int4, or another --model-geometry")
    return found


def _largest(vectors: Tensor) -> Tensor:
    return vectors.abs().amax(-1, keepdim=True)


def _grouped(vectors: Tensor) -> Tensor:
    return vectors.reshape(*vectors.shape[:-1], -1, GROUP)


def _quotients(vectors: Tensor, scales: Tensor) -> Tensor:
    """Vectors in units of their scale. 0 where the scale is 0, and where either is not finite: a scale that is not
    finite makes the vector read so whatever its codes are."""
    return torch.where(scales > 0, vectors / scales, 0.0).nan_to_num(0.0, 0.0, 0.0)


def _floats(scales: Tensor) -> Tensor:
    return scales.contiguous().view(torch.float32)


def _pack(codes: Tensor) -> Tensor:
    """Two codes of 4 bits a byte, the first in the low half; an odd last one has zeros above it."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _unpack(packed: Tensor) -> Tensor:
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
