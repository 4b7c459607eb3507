"""Draws bytes by process: a panel for each strategy, bytes read above the line, bytes received below."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np

from orbax_ext import text as text_lib
from orbax_ext.plan.forecast.forecast import Forecast

_WIDTH, _HEIGHT, _LEFT, _GAP, _TOP = 860, 190, 90, 46, 64
_MOST = 256  # bars; with more processes, each bar stands for several
_READ, _RECEIVED, _INK, _FAINT = "#2563a8", "#c2571a", "#1d2733", "#c9d1da"


def draw(title: str, forecasts: Sequence[Forecast]) -> str:
    """Returns an SVG. All panels share one scale for bytes read, and one for bytes received."""
    most = (
        max(1, *(int(forecast.volumes.read.max()) for forecast in forecasts)),
        max(1, *(int(forecast.volumes.received.max()) for forecast in forecasts)),
    )
    height = _TOP + len(forecasts) * (_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="13" fill="{_INK}" shape-rendering="crispEdges">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="16" y="26" font-size="16" font-weight="bold">{html.escape(title)}</text>',
        f'<rect x="16" y="39" width="11" height="11" fill="{_READ}"/><text x="32" y="49">read from storage</text>',
        f'<rect x="166" y="39" width="11" height="11" fill="{_RECEIVED}"/>'
        '<text x="182" y="49">received from other processes</text>',
    ]
    for number, forecast in enumerate(forecasts):
        parts += _panel(forecast, _TOP + number * (_HEIGHT + _GAP), most)
    return "\n".join([*parts, "</svg>\n"])


def _panel(forecast: Forecast, top: int, most: tuple[int, int]) -> list[str]:
    read, received = _bars(forecast.volumes.read), _bars(forecast.volumes.received)
    half = (_HEIGHT - 24) / 2
    line = top + 24 + half
    step = (_WIDTH - _LEFT - 20) / len(read)
    per_bar = -(-len(forecast.volumes.read) // len(read))
    total, expected = text_lib.size(forecast.volumes.total_read), text_lib.seconds(forecast.seconds)
    heading = f"{forecast.strategy}: {total} read in all, {expected} expected"
    parts = [f'<text x="{_LEFT}" y="{top + 14}" font-weight="bold">{html.escape(heading)}</text>']
    for sign, scale in zip((-1, 1), most, strict=True):
        edge = line + sign * half
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{edge:.1f}" y2="{edge:.1f}" stroke="{_FAINT}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{edge + 4:.1f}" text-anchor="end">{text_lib.size(scale)}</text>')
    for number, (up, down) in enumerate(zip(read, received, strict=True)):
        first, last = number * per_bar, min((number + 1) * per_bar, len(forecast.volumes.read)) - 1
        who = f"process {first}" if first == last else f"processes {first} to {last}, the busiest"
        tooltip = f"{who}: {text_lib.size(up)} read, {text_lib.size(down)} received"
        x, width = _LEFT + number * step, step - (2 if step > 6 else 0)
        parts.append(f"<g><title>{html.escape(tooltip)}</title>")
        for value, scale, colour in ((up, most[0], _READ), (down, most[1], _RECEIVED)):
            length = half * value / scale
            y = line - length if colour is _READ else line
            parts.append(f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{length:.2f}" fill="{colour}"/>')
        parts.append("</g>")
    parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{line:.1f}" y2="{line:.1f}" stroke="{_INK}"/>')
    bottom = top + _HEIGHT + 16
    parts.append(f'<text x="{_LEFT}" y="{bottom}">process 0</text>')
    last_name = f"process {len(forecast.volumes.read) - 1}"
    parts.append(f'<text x="{_WIDTH - 20}" y="{bottom}" text-anchor="end">{last_name}</text>')
    return parts


def _bars(values: np.ndarray) -> list[int]:
    """Returns the values, or if there are too many to be seen, the largest of each run of neighbours."""
    per_bar = -(-len(values) // _MOST)
    return [int(values[start : start + per_bar].max()) for start in range(0, len(values), per_bar)]
