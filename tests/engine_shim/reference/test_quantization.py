"""Formats of the KV cache: their bytes, their bounds of error, and that a vector is stored the same in any company."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine_shim.errors import SettingsError
from engine_shim.reference.geometry import named_geometry
from engine_shim.reference.quantization import STORED_FORMATS, StoredFormat, stored_format

QUANTISED = [name for name in STORED_FORMATS if STORED_FORMATS[name].element is torch.uint8]
ROUNDING = 1.0 + 1e-4  # float32 arithmetic on top of half a step


def round_trip(stored: StoredFormat, vectors: Tensor) -> Tensor:
    return stored.decode(stored.encode(vectors), vectors.shape[-1]).float()


def bound(name: str, vectors: Tensor) -> Tensor:
    """Half a step of each element, worked out from the numbers alone: nothing of it is read from what is stored."""
    size = vectors.abs()
    if name == "int8":
        return (size.amax(-1, keepdim=True) / 127 / 2).expand_as(vectors)
    if name == "int4":
        zero = torch.zeros(1)
        spread = torch.maximum(vectors.amax(-1, keepdim=True), zero) - torch.minimum(
            vectors.amin(-1, keepdim=True), zero
        )
        return (spread / 15 / 2).expand_as(vectors)
    if name == "int4_group32":
        most = size.view(-1, 32).amax(-1, keepdim=True) / 7
        # A float16 scale is up to 2^-11 of itself off, or half of 2^-24: seven times that at the largest code.
        off = torch.maximum(most * 2**-11, torch.tensor(2.0**-25))
        return (most / 2 * (1 + 2**-10) + 7 * off).expand(-1, 32).reshape(vectors.shape)
    scale = size.amax(-1, keepdim=True) / 448 if name == "fp8_per_token_head" else torch.ones(1)
    return torch.maximum(size / 16, (scale * 2.0**-10).expand_as(size))  # steps of 2^-9 below the normal numbers


@pytest.mark.parametrize(
    ("name", "bytes_of_64"),
    [
        ("float16", 128), ("bfloat16", 128), ("float32", 256), ("fp8", 64), ("fp8_per_token_head", 68),
        ("int8", 68), ("int4", 36), ("int4_group32", 36),
    ],
)  # fmt: skip
def test_a_vector_takes_codes_and_scales(name: str, bytes_of_64: int) -> None:
    stored = STORED_FORMATS[name]
    assert stored.vector_bytes(64) == bytes_of_64
    assert stored.encode(torch.ones(5, 3, 64)).nbytes == 5 * 3 * bytes_of_64
    assert stored.token_bytes(named_geometry("SmolLM2-135M")) == 2 * 30 * 3 * bytes_of_64


@pytest.mark.parametrize("name", QUANTISED)
@settings(max_examples=60)
@given(data=st.data())
def test_the_error_is_half_a_step_at_most(name: str, data: st.DataObject) -> None:
    exponent = data.draw(st.integers(-12, 8))
    one = st.floats(-1.0, 1.0, width=32).map(lambda value: value * 2.0**exponent)
    vectors = torch.tensor(data.draw(st.lists(one, min_size=64, max_size=64))).view(2, 32)
    error = (round_trip(STORED_FORMATS[name], vectors) - vectors).abs()
    assert bool((error <= bound(name, vectors) * ROUNDING + 1e-37).all())


@pytest.mark.parametrize("name", QUANTISED)
def test_the_bound_is_no_looser_than_it_says(name: str) -> None:
    """Negative control: what is 0.9 of half a step is exceeded, and another format's bound does not hold."""
    vectors = torch.randn(2000, 64, generator=torch.Generator().manual_seed(1))
    error = (round_trip(STORED_FORMATS[name], vectors) - vectors).abs()
    assert bool((error <= bound(name, vectors) * ROUNDING).all())
    assert bool((error > 0.9 * bound(name, vectors)).any())
    coarser = round_trip(STORED_FORMATS["int4"], vectors)
    if name != "int4":
        assert bool(((coarser - vectors).abs() > bound(name, vectors)).any())


def test_the_layout_of_int8() -> None:
    stored = STORED_FORMATS["int8"].encode(torch.tensor([[0.0, 1.0, -2.0, 254.0]]))
    assert bytes(stored.flatten().tolist()) == bytes([0, 0, 255, 127]) + struct.pack("<f", 2.0)  # 0.5 goes to even


def test_the_layout_of_int4() -> None:
    stored = STORED_FORMATS["int4"].encode(torch.tensor([[0.0, -4.0, 11.0, 1.2, 3.0]]))
    codes, scale = bytes(stored.flatten().tolist())[:3], bytes(stored.flatten().tolist())[3:]
    assert codes == bytes([0x04, 0x5F, 0x07])  # the first code in the low half; a fifth alone in the last byte
    (bits,) = struct.unpack("<I", scale)
    assert bits & 0xF == 4
    assert struct.unpack("<f", struct.pack("<I", bits & ~0xF))[0] == pytest.approx(1.0, rel=2**-19)


def test_the_layout_of_groups() -> None:
    vector = torch.zeros(1, 64)
    vector[0, 0], vector[0, 1], vector[0, 63] = -7.0, 3.0, 14.0
    stored = STORED_FORMATS["int4_group32"].encode(vector).flatten().tolist()
    assert stored[0] == 0xA0  # 3 + 7 above -7 + 7
    assert stored[31] == 0xE7  # 7 + 7 of scale 2 above 0 + 7
    assert struct.unpack("<2e", bytes(stored[32:])) == (1.0, 2.0)


@pytest.mark.parametrize("name", STORED_FORMATS)
def test_a_vector_is_stored_the_same_in_any_company(name: str) -> None:
    """So that a token can be appended to a block, and a batch of other tokens changes nothing."""
    stored = STORED_FORMATS[name]
    vectors = torch.randn(40, 3, 64, generator=torch.Generator().manual_seed(2))
    together = stored.encode(vectors)
    alone = torch.cat([stored.encode(vectors[index : index + 1]) for index in range(40)])
    assert torch.equal(together.view(torch.uint8), alone.view(torch.uint8))


@pytest.mark.parametrize("name", STORED_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_zeros_stay_zeros(name: str, dtype: torch.dtype) -> None:
    assert not bool(round_trip(STORED_FORMATS[name], torch.zeros(3, 64, dtype=dtype)).any())


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["fp8_per_token_head", "int8", "int4", "int4_group32"])
def test_what_is_not_finite_does_not_read_as_finite(name: str, wrong: float) -> None:
    vectors = torch.ones(2, 64)
    vectors[1, 7] = wrong
    back = round_trip(STORED_FORMATS[name], vectors)
    assert bool(back[0].isfinite().all())
    assert not bool(back[1, :32].isfinite().any())


def test_fp8_without_scales_saturates() -> None:
    back = round_trip(STORED_FORMATS["fp8"], torch.tensor([448.0, 1000.0, -1e9, float("inf"), float("nan")]))
    assert back[:4].tolist() == [448.0, 448.0, -448.0, 448.0]
    assert bool(back[4].isnan())
    scaled = round_trip(STORED_FORMATS["fp8_per_token_head"], torch.tensor([448.0, 1000.0, -1e9, 0.0]))
    assert scaled[2] == pytest.approx(-1e9, rel=1e-6)


def test_an_odd_head_has_one_code_more() -> None:
    vectors = torch.randn(9, 7, generator=torch.Generator().manual_seed(3))
    assert STORED_FORMATS["int4"].vector_bytes(7) == 8
    assert bool(
        ((round_trip(STORED_FORMATS["int4"], vectors) - vectors).abs() <= bound("int4", vectors) * ROUNDING).all()
    )


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"'int3' is not known; use one of float16, .*int4_group32"):
        stored_format("int3", 64)
    with pytest.raises(SettingsError, match="heads of a multiple of 32, not of 48; use int4"):
        stored_format("int4_group32", 48)
    assert stored_format("int4", 48).vector_bytes(48) == 28
