"""Colours of the states: far enough apart for colour-blind eyes, by arithmetic of our own.

Formulas: sRGB and CIE Lab (D65) from IEC 61966-2-1 and CIE 15; simulated dichromacy by the matrices for severity 1.0 of
Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency" (2009),
applied to linear RGB; colour difference CIEDE2000 as written out by Sharma, Wu and Dalal (2005).
"""

from __future__ import annotations

from itertools import combinations
from math import atan2, cos, degrees, exp, hypot, radians, sin, sqrt

import numpy as np
import pytest
from numpy.typing import NDArray

from dashboard.palette import DARK, LIGHT, STATE_ORDER, Theme, theme_named

FIVE = ("free", "cached", "used", "pinned", "reserved")
LEAST_DIFFERENCE = 20.0
VISION = {
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = np.array([0.95047, 1.0, 1.08883])


def linear(colour: str) -> NDArray[np.float64]:
    channels = np.array(list(bytes.fromhex(colour[1:]))) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(rgb: NDArray[np.float64]) -> tuple[float, float, float]:
    ratio = TO_XYZ @ rgb / WHITE
    x, y, z = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return float(116 * y - 16), float(500 * (x - y)), float(200 * (y - z))


def seen(colour: str, vision: str) -> tuple[float, float, float]:
    return lab(np.clip(VISION[vision] @ linear(colour), 0, 1))


def ciede2000(one: tuple[float, float, float], two: tuple[float, float, float]) -> float:
    mean_chroma = (hypot(*one[1:]) + hypot(*two[1:])) / 2
    stretch = 1.5 - 0.5 * sqrt(mean_chroma**7 / (mean_chroma**7 + 25**7))
    a1, a2 = one[1] * stretch, two[1] * stretch
    c1, c2 = hypot(a1, one[2]), hypot(a2, two[2])
    h1, h2 = degrees(atan2(one[2], a1)) % 360, degrees(atan2(two[2], a2)) % 360
    grey = c1 * c2 == 0
    hue_step = 0.0 if grey else (h2 - h1 + 180) % 360 - 180
    dl, dc, dh = two[0] - one[0], c2 - c1, 2 * sqrt(c1 * c2) * sin(radians(hue_step) / 2)
    lightness, chroma = (one[0] + two[0]) / 2, (c1 + c2) / 2
    if grey:
        hue = h1 + h2
    elif abs(h1 - h2) <= 180:
        hue = (h1 + h2) / 2
    else:
        hue = (h1 + h2 + (360 if h1 + h2 < 360 else -360)) / 2
    weight = 1 - 0.17 * cos(radians(hue - 30)) + 0.24 * cos(radians(2 * hue))
    weight += 0.32 * cos(radians(3 * hue + 6)) - 0.20 * cos(radians(4 * hue - 63))
    sl = 1 + 0.015 * (lightness - 50) ** 2 / sqrt(20 + (lightness - 50) ** 2)
    sc, sh = 1 + 0.045 * chroma, 1 + 0.015 * chroma * weight
    turn = -sin(radians(60 * exp(-(((hue - 275) / 25) ** 2)))) * 2 * sqrt(chroma**7 / (chroma**7 + 25**7))
    return sqrt((dl / sl) ** 2 + (dc / sc) ** 2 + (dh / sh) ** 2 + turn * (dc / sc) * (dh / sh))


def smallest_difference(theme: Theme, vision: str) -> tuple[float, str, str]:
    return min(
        (ciede2000(seen(theme.states[one], vision), seen(theme.states[two], vision)), one, two)
        for one, two in combinations(FIVE, 2)
    )


@pytest.mark.parametrize(
    ("one", "two", "difference"),
    [
        # Pairs 1, 7, 17 and 25 of the test data published with the formula.
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 0.0, 0.0), (50.0, -1.0, 2.0), 2.3669),
        ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ],
)
def test_difference_formula_gives_published_values(
    one: tuple[float, float, float], two: tuple[float, float, float], difference: float
) -> None:
    assert ciede2000(one, two) == pytest.approx(difference, abs=1e-4)
    assert ciede2000(two, one) == pytest.approx(difference, abs=1e-4)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
@pytest.mark.parametrize("vision", ["normal", "deuteranopia"])
def test_states_stay_apart(theme: Theme, vision: str) -> None:
    difference, one, two = smallest_difference(theme, vision)
    assert difference >= LEAST_DIFFERENCE, f"{one} and {two} are {difference:.1f} apart"


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_states_can_be_told_apart_with_protanopia(theme: Theme) -> None:
    assert smallest_difference(theme, "protanopia")[0] >= 15


def test_red_and_green_would_not_pass() -> None:
    traffic_light = LIGHT.states | {"used": "#c0504d", "free": "#6f8f3f"}
    theme = Theme(**{name: getattr(LIGHT, name) for name in LIGHT.__slots__} | {"states": traffic_light})
    assert smallest_difference(theme, "deuteranopia")[0] < LEAST_DIFFERENCE


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_every_state_has_a_colour(theme: Theme) -> None:
    assert set(theme.states) == set(STATE_ORDER)
    assert len(set(theme.states.values())) == len(STATE_ORDER)


def test_theme_is_light_until_the_browser_says_otherwise() -> None:
    assert theme_named(None) is LIGHT
    assert theme_named("light") is LIGHT
    assert theme_named("dark") is DARK
