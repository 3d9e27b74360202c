"""Line charts and bars as inline SVG text: scales, ticks, axes, paths. No script; colours are CSS classes c0, c1, ...

A chart is a plain string that scales with its page and prints as sharp as text:

    chart("TTFT", [Series("serial", xs, ys)], Scale(0, 10, "s"), Scale(1, 500, "ms", "log"))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

WIDTH, HEIGHT = 460, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 26, 38
NUM_COLOURS = 8
_NINES = ((0.0, "0"), (0.5, "50"), (0.9, "90"), (0.99, "99"), (0.999, "99.9"), (0.9999, "99.99"), (0.99999, "99.999"))


@dataclass(frozen=True, slots=True)
class Scale:
    """A range of values and how it lies on an axis: linear, log, or nines (percentiles: 0, 90, 99, 99.9 apart)."""

    low: float
    high: float
    label: str = ""
    kind: Literal["linear", "log", "nines"] = "linear"

    def at(self, values: Floats | float) -> Floats:
        """Position along the axis, 0 to 1."""
        low, high = self._inner(np.array([self.low, self.high]))
        result: Floats = (self._inner(np.asarray(values, dtype=np.float64)) - low) / (high - low if high > low else 1)
        return result

    def _inner(self, values: Floats) -> Floats:
        result = values
        if self.kind == "log":
            result = np.log10(np.maximum(values, 1e-12))
        elif self.kind == "nines":
            result = -np.log10(np.maximum(1 - values, 1e-12))
        return result

    def ticks(self) -> list[tuple[float, str]]:
        """(value, text) of the marks on the axis."""
        if self.kind == "nines":
            return [(value, text) for value, text in _NINES if value <= self.high]
        if self.kind == "log":
            exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(exponents) <= 4 else (1,)
            marks = [step * 10.0**e for e in exponents for step in steps]
        else:
            step = nice_step((self.high - self.low) / 5)
            marks = [
                step * i for i in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)
            ]
        return [
            (mark, f"{mark:g}") for mark in marks if self.low <= mark * (1 + 1e-9) and mark <= self.high * (1 + 1e-9)
        ]


def nice_step(rough: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `rough`."""
    if rough <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough * (1 - 1e-9))


def scale_for(values: Sequence[Floats], label: str, *, log: bool | None = None, zero: bool = True) -> Scale:
    """A scale that holds all finite values; log when they span more than a factor of 30, or as told."""
    known = np.concatenate([v[np.isfinite(v)] for v in values]) if values else np.empty(0)
    if not len(known):
        return Scale(0, 1, label)
    low, high = float(known.min()), float(known.max())
    positive = known[known > 0]
    if log is None:
        log = len(positive) > 1 and high > 30 * float(np.quantile(positive, 0.02))
    if log and len(positive):
        low = max(float(positive.min()), high / 1e5)
        return Scale(low / 1.1, max(high, low * 1.2) * 1.1, label, "log")
    low = min(0.0, low) if zero else low
    return Scale(low, (high if high > low else low + 1) * 1.05, label)


@dataclass(frozen=True, slots=True)
class Series:
    """One line (or points) of a chart. colour: index of a colour class. titles: one a point, shown on hover."""

    name: str
    x: Floats
    y: Floats
    colour: int = 0
    kind: Literal["line", "steps", "points"] = "line"
    titles: Sequence[str] = ()


def _f(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def path(xs: Floats, ys: Floats, steps: bool = False) -> str:
    """The d attribute of a line through points; a NaN starts a new piece; steps: horizontal, then vertical."""
    parts: list[str] = []
    pen_down = False
    for x, y in zip(xs, ys, strict=True):
        if not (math.isfinite(x) and math.isfinite(y)):
            pen_down = False
        elif not pen_down:
            parts.append(f"M{_f(x)} {_f(y)}")
            pen_down = True
        else:
            parts.append(f"H{_f(x)}V{_f(y)}" if steps else f"L{_f(x)} {_f(y)}")
    return "".join(parts)


def chart(title: str, series: Sequence[Series], x: Scale, y: Scale, *, width: int = WIDTH, height: int = HEIGHT) -> str:
    """An SVG element: title, axes with ticks and units, the series. Legends are the page's."""
    right, bottom = width - RIGHT, height - BOTTOM

    def xs(values: Floats | float) -> Floats:
        return LEFT + x.at(values) * (right - LEFT)

    def ys(values: Floats | float) -> Floats:
        return bottom - y.at(values) * (bottom - TOP)

    out = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">']
    out.append(f'<text class="title" x="{LEFT}" y="15">{escape(title)}</text>')
    for value, text in y.ticks():
        at = _f(float(ys(value)))
        out.append(f'<path class="grid" d="M{LEFT} {at}H{right}"/>')
        out.append(f'<text class="tick" x="{LEFT - 5}" y="{at}" dy=".32em" text-anchor="end">{text}</text>')
    for value, text in x.ticks():
        at = _f(float(xs(value)))
        out.append(f'<path class="grid" d="M{at} {TOP}V{bottom}"/>')
        out.append(f'<text class="tick" x="{at}" y="{bottom + 14}" text-anchor="middle">{text}</text>')
    out.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    out.append(f'<text class="label" x="{right}" y="{height - 6}" text-anchor="end">{escape(x.label)}</text>')
    out.append(f'<text class="label" x="{right}" y="15" text-anchor="end">{escape(y.label)}</text>')
    for one in series:
        px, py = xs(one.x), ys(one.y)
        colour = f"c{one.colour % NUM_COLOURS}"
        if one.kind != "points":
            d = path(px, py, one.kind == "steps")
            out.append(f'<path class="line {colour}" d="{d}"><title>{escape(one.name)}</title></path>')
        if one.kind == "points" or one.titles:
            for i in range(len(px)):
                if math.isfinite(px[i]) and math.isfinite(py[i]):
                    text = one.titles[i] if one.titles else one.name
                    out.append(
                        f'<circle class="dot {colour}" cx="{_f(px[i])}" cy="{_f(py[i])}" r="4">'
                        f"<title>{escape(text)}</title></circle>"
                    )
    out.append("</svg>")
    return "".join(out)
