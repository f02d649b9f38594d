"""Plots of bandwidth over message size: an SVG file, and bars for a terminal. Pure, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

Points = Sequence[tuple[int, float]]
"""(message size in bytes, GB/s)."""

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 48, 56
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito (2008): told apart by people with any colour vision."""
BLOCKS = " ▏▎▍▌▋▊▉█"


def size_text(size: int) -> str:
    """Return "16 MiB" for 16777216."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            return f"{size / (1 << shift):g} {unit}" if size % (1 << shift) == 0 else f"{size / (1 << shift):.1f} {unit}"
    return f"{size} B"


def bar(value: float, most: float, width: int) -> str:
    """Return a bar of at most `width` characters for `value` of `most`, in eighths of a character."""
    if not (most > 0 and value > 0):
        return ""
    eighths = round(min(1.0, value / most) * width * 8)
    return "█" * (eighths // 8) + (BLOCKS[eighths % 8] if eighths % 8 else "")


def svg(title: str, series: Mapping[str, Points], limit: tuple[float, str] | None = None) -> str:
    """Return an SVG document: one line a series, sizes on a logarithmic axis; `limit`: a level (GB/s) with its name."""
    points = [point for own in series.values() for point in own]
    sizes = sorted({size for size, _ in points}) or [1, 2]
    top = _nice(max([value for _, value in points] + ([limit[0]] if limit else []) + [1e-6]))
    low, high = math.log2(sizes[0]), math.log2(max(sizes[-1], sizes[0] * 2))

    def x(size: int) -> float:
        return LEFT + (math.log2(size) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for step in range(6):
        value = top * step / 5
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    shown = sizes[:: max(1, math.ceil(len(sizes) / 8))]
    for size in shown:
        out.append(f'<text x="{x(size):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{size_text(size)}</text>')
    out.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 14}" text-anchor="middle">message size</text>')
    out.append(
        f'<text x="16" y="{HEIGHT / 2}" transform="rotate(-90 16 {HEIGHT / 2})" text-anchor="middle">bus bandwidth, GB/s</text>'
    )
    if limit is not None:
        out.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(limit[0]):.1f}" y2="{y(limit[0]):.1f}" stroke="#999"'
            ' stroke-dasharray="6 4"/>'
        )
        out.append(f'<text x="{WIDTH - RIGHT}" y="{y(limit[0]) - 5:.1f}" text-anchor="end" fill="#666">{escape(limit[1])}</text>')
    for number, (name, own) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(f"{x(size):.1f},{y(value):.1f}" for size, value in sorted(own))
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x(size):.1f}" cy="{y(value):.1f}" r="3" fill="{colour}"/>' for size, value in own]
        out.append(f'<text x="{LEFT + 8 + number * 150}" y="{TOP - 6}" fill="{colour}">● {escape(name)}</text>')
    return "\n".join([*out, "</svg>", ""])


def _nice(value: float) -> float:
    """Return the next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1.0, 2.0, 2.5, 5.0, 10.0) if value <= step * power * (1 + 1e-9))
