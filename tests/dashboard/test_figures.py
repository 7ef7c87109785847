"""What the figures say, read back from the figures."""

from __future__ import annotations

import base64
import gzip
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agent.wire import History, HistoryPoint, MapCells
from dashboard.colouring import cell_counts
from dashboard.figure_component import CONFIG, pack
from dashboard.figures import block_map, columns_of, fragmentation_history
from dashboard.palette import DARK, LIGHT

Cells = Callable[..., MapCells]


def draw(cells: MapCells, theme: Any = LIGHT, incarnation: str = "a1") -> Any:
    return block_map(cells, theme, incarnation=incarnation)


def picture(figure: Any) -> np.ndarray:
    source = figure.layout.images[0].source
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).convert("RGBA"))


def rgb(colour: str) -> list[int]:
    return list(bytes.fromhex(colour[1:]))


@pytest.mark.parametrize(("cells", "columns"), [(1, 1), (2, 2), (5, 4), (1000, 32), (4096, 64), (3907, 64)])
def test_rows_are_near_square_and_at_most_64_wide(cells: int, columns: int) -> None:
    assert columns_of(cells) == columns


def test_one_block_a_cell_shows_each_state_in_its_colour(cells: Cells) -> None:
    states = np.array([4, 2, 1, 0, 3, 2, 2], dtype=np.uint8)
    pixels = picture(draw(cells(states)))
    assert pixels.shape[:2] == (2, 4)
    names = ["free", "cached", "used", "pinned", "reserved"]
    for block, state in enumerate(states):
        assert pixels[block // 4, block % 4].tolist() == [*rgb(LIGHT.states[names[state]]), 255]
    assert pixels[1, 3, 3] == 0  # the pool ends before the last row does


def test_many_blocks_a_cell_show_their_mix_held_first(cells: Cells) -> None:
    states = np.repeat(np.array([0, 2, 1, 2], dtype=np.uint8), [100, 100, 50, 150])
    pixels = picture(draw(cells(states, cells=2)))
    assert pixels.shape[:2] == (1, 16)
    first, second = pixels[0, :8, :3].tolist(), pixels[0, 8:, :3].tolist()
    assert first == [rgb(LIGHT.states["used"])] * 4 + [rgb(LIGHT.states["free"])] * 4
    assert second == [rgb(LIGHT.states["used"])] * 6 + [rgb(LIGHT.states["cached"])] * 2


def test_hover_carries_range_mix_and_references_of_each_cell(cells: Cells) -> None:
    states = np.random.default_rng(5).integers(0, 5, 10_007).astype(np.uint8)
    wire_cells = cells(states)
    trace = draw(wire_cells).data[0]
    custom = np.asarray(trace.customdata).reshape(-1, 3)
    text = np.asarray(trace.text).ravel().tolist()
    for cell in (0, 17, wire_cells.cells - 1):
        start, end = 3 * cell, min(3 * cell + 3, len(states))
        assert custom[cell, :2].tolist() == [start, end - 1]
        by_name = dict(part.split(" ") for part in text[cell].partition("<br>")[0].split(" · "))
        for value, name in enumerate(("free", "cached", "used", "pinned", "reserved")):
            assert int(by_name.pop(name, 0)) == (states[start:end] == value).sum()
        assert by_name == {}
        assert wire_cells.references is not None
        assert custom[cell, -1] == wire_cells.references[cell]
    assert [words.rpartition(": ")[2] for words in text[:3]] == ["nobody", "request-a", "request-b"]


def test_hover_leaves_out_states_that_a_cell_has_none_of(cells: Cells) -> None:
    states = np.repeat(np.array([2, 0], dtype=np.uint8), [1500, 500])
    text = np.asarray(draw(cells(states, cells=2)).data[0].text).ravel().tolist()
    assert text == ["used 1,000<br>owner of most: nobody", "used 500 · free 500<br>owner of most: request-a"]


def test_zoom_and_pan_stay_inside_the_pool(cells: Cells) -> None:
    layout = draw(cells(np.zeros(1000, np.uint8))).layout
    for axis, length in ((layout.xaxis, 32), (layout.yaxis, 32)):
        assert (axis.minallowed, axis.maxallowed) == (-0.5, length - 0.5)
        assert sorted(axis.range) == [axis.minallowed, axis.maxallowed]
    assert CONFIG["scrollZoom"] is False


def test_hover_of_a_single_block_names_its_state(cells: Cells) -> None:
    trace = draw(cells(np.array([2, 0, 1, 4], dtype=np.uint8))).data[0]
    assert [word.split("<br>")[0] for word in np.asarray(trace.text).ravel()] == [
        "<b>used</b>",
        "<b>free</b>",
        "<b>cached</b>",
        "<b>reserved</b>",
    ]


def test_columns_that_the_map_lacks_are_not_invented(cells: Cells) -> None:
    trace = draw(cells(np.zeros(9, np.uint8), references=None, age_seconds=None, owner=None, owners=[])).data[0]
    assert "reference" not in trace.hovertemplate
    assert "touched" not in trace.hovertemplate
    assert "not in the map" in trace.text[0][0]


def test_unknown_states_are_drawn_as_unknown(cells: Cells) -> None:
    figure = draw(cells(np.zeros(2, np.uint8), state=[255, 0], counts={"unknown": [1, 0], "free": [0, 1]}))
    assert picture(figure)[0, 0, :3].tolist() == rgb(LIGHT.states["unknown"])
    assert "unknown" in figure.data[0].text[0][0]


def test_zoom_is_kept_while_the_pool_is_the_same(cells: Cells) -> None:
    before, after = (draw(cells(np.full(500, state, np.uint8))) for state in (0, 2))
    assert before.layout.uirevision == after.layout.uirevision
    restarted = draw(cells(np.zeros(500, np.uint8)), incarnation="b2")
    grown = draw(cells(np.zeros(501, np.uint8)))
    assert len({figure.layout.uirevision for figure in (before, restarted, grown)}) == 3


def test_counts_are_a_partition(cells: Cells) -> None:
    states = np.random.default_rng(2).integers(0, 5, 9999).astype(np.uint8)
    assert cell_counts(cells(states)).sum() == 9999


@pytest.mark.parametrize("blocks", [1, 2, 4095, 4096, 4097, 1_000_000])
def test_any_size_of_pool_can_be_drawn_and_sent(cells: Cells, blocks: int) -> None:
    wire_cells = cells(np.zeros(blocks, np.uint8)) if blocks < 10_000 else cells(np.arange(blocks, dtype=np.uint8) % 5)
    packed = pack(draw(wire_cells, DARK), plotly_url="x", expires_ms=1000)
    sent = json.loads(gzip.decompress(packed))
    assert sent["expires_ms"] == 1000
    assert sent["data"][0]["type"] == "heatmap"
    assert sent["layout"].get("template") in (None, {})


def test_a_full_map_of_long_random_owners_stays_small(cells: Cells) -> None:
    random = np.random.default_rng(1)
    states = random.integers(0, 5, 1_000_000).astype(np.uint8)
    owners = [f"cmpl-{random.bytes(16).hex()}-0" for _ in range(1000)]
    wire_cells = cells(states, owner=random.integers(0, 1000, 4082).tolist(), owners=owners)
    assert len(pack(draw(wire_cells), plotly_url="x", expires_ms=None)) < 120_000  # of 150 KB for the whole page


def history(values: list[tuple[float, float | None]], metric: str = "fragmentation") -> History:
    points = [
        HistoryPoint(time_unix=when, minimum=value, mean=value, maximum=None if value is None else value + 0.1)
        for when, value in values
    ]
    return History(id="example", metric=metric, step_seconds=1.0, points=points)


def trend(rate: History, strict: History | None = None) -> Any:
    return fragmentation_history(rate, strict or rate, threshold=0.3, theme=LIGHT)


def test_history_has_its_threshold_and_both_sets() -> None:
    figure = trend(history([(100.0, 0.5), (101.0, 0.6)]), history([(100.0, 0.2), (101.0, 0.1)]))
    lines = {trace.name: trace for trace in figure.data if trace.name}
    assert lines["free + cached"].y == pytest.approx([0.5, 0.6])
    assert lines["free alone"].y == pytest.approx([0.2, 0.1])
    assert lines["free + cached"].x.tolist() == [100_000.0, 101_000.0]
    assert figure.layout.shapes[0].y0 == figure.layout.shapes[0].y1 == 0.3
    assert figure.layout.annotations[0].text == "threshold 30%"


def test_what_was_not_measured_is_a_gap() -> None:
    figure = trend(history([(100.0, 0.5), (101.0, None), (102.0, 0.6), (110.0, 0.7)]))
    mean = next(trace for trace in figure.data if trace.name == "free + cached")
    assert np.isnan(mean.y).tolist() == [False, True, False, True, False]
    assert mean.connectgaps is False


def test_the_range_is_a_band_for_each_stretch_that_was_measured() -> None:
    figure = trend(history([(100.0, 0.5), (101.0, 0.4), (102.0, None), (103.0, 0.7)]))
    band = next(trace for trace in figure.data if trace.fill == "toself")
    assert band.x.tolist() == [100_000, 101_000, 101_000, 100_000, 101_000, 103_000, 103_000, 103_000]
    assert band.y == pytest.approx([0.6, 0.5, 0.4, 0.5, np.nan, 0.8, 0.7, np.nan], nan_ok=True)


def test_an_empty_history_is_an_empty_figure() -> None:
    figure = trend(history([]))
    assert all(len(trace.x) == 0 for trace in figure.data)


def test_undefined_values_never_become_bad_json() -> None:
    packed = pack(trend(history([(100.0, None)])), plotly_url="x", expires_ms=None)
    assert b"NaN" not in gzip.decompress(packed)
