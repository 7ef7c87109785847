"""Shares to stripes, stripes to a picture that another library reads back."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from dashboard.raster import MAX_STRIPES, indexed_png, stripes


def shown(counts: list[int], width: int = 8) -> list[int]:
    """Stripes of one cell, counted by state."""
    cell = stripes(np.array([counts]).T, width)[0]
    return [int((cell == state).sum()) for state in range(len(counts))]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        pytest.param([8, 0, 0], [8, 0, 0], id="one state fills the cell"),
        pytest.param([50, 0, 50], [4, 0, 4], id="halves"),
        pytest.param([1, 0, 244], [1, 0, 7], id="one used block of 245 is seen"),
        pytest.param([1, 1, 243], [1, 1, 6], id="so are two"),
        pytest.param([3, 0, 5], [3, 0, 5], id="as many stripes as blocks: exact"),
        pytest.param([245, 1, 1], [6, 1, 1], id="the widest gives way"),
    ],
)
def test_stripes_of_one_cell(counts: list[int], expected: list[int]) -> None:
    assert shown(counts) == expected


@given(arrays(np.int64, st.tuples(st.just(6), st.integers(1, 40)), elements=st.integers(0, 5000)))
def test_stripes_show_what_is_there_in_order_and_in_proportion(counts: np.ndarray) -> None:
    counts[0, counts.sum(axis=0) == 0] = 1
    cells = stripes(counts, MAX_STRIPES)
    assert cells.shape == (counts.shape[1], MAX_STRIPES)
    assert (np.diff(cells.astype(int), axis=1) >= 0).all()
    given_stripes = np.stack([(cells == state).sum(axis=1) for state in range(6)])
    assert ((given_stripes > 0) == (counts > 0)).all()
    quota = counts * MAX_STRIPES / counts.sum(axis=0)
    # Each of the others may have been owed a stripe at the expense of the widest.
    assert (np.abs(given_stripes - quota) < 6).all()
    assert (given_stripes <= np.maximum(np.ceil(quota), 1)).all()


def test_too_few_stripes_are_refused() -> None:
    with pytest.raises(ValueError, match="2 stripes cannot show 3 states"):
        stripes(np.array([[1], [1], [1]]), 2)


def test_png_is_read_back_pixel_by_pixel() -> None:
    pixels = np.array([[0, 1, 2], [2, 9, 0]], dtype=np.uint8)
    image = Image.open(io.BytesIO(indexed_png(pixels, ["#102030", "#a0b0c0", "#ffffff"]))).convert("RGBA")
    read = np.asarray(image)
    assert read.shape == (2, 3, 4)
    assert read[0, 0].tolist() == [0x10, 0x20, 0x30, 255]
    assert read[0, 1].tolist() == [0xA0, 0xB0, 0xC0, 255]
    assert read[1, 0].tolist() == [255, 255, 255, 255]
    assert read[1, 1, 3] == 0  # past the palette: nothing there
