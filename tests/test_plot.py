"""Plots: well-formed SVG whatever is plotted, and bars in proportion."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from r4090c.plot import bar, size_text, svg

POINTS = st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(0, 1e6)), min_size=1, max_size=20)


@given(st.dictionaries(st.text(st.characters(blacklist_categories=("Cs", "Cc"))), POINTS, min_size=0, max_size=4))
def test_svg_is_well_formed(series: dict[str, list[tuple[int, float]]]) -> None:
    root = ElementTree.fromstring(svg("a <title> & more", series, (3.0, "limit")))
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == len(series)


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(1, 80))
def test_a_bar_is_no_longer_than_its_place(value: float, most: float, width: int) -> None:
    assert len(bar(value, most, width)) <= width


def test_bars_are_in_proportion() -> None:
    assert (bar(1, 1, 8), bar(0.5, 1, 8), bar(0.25, 1, 2), bar(0, 1, 8), bar(1, 0, 8)) == ("█" * 8, "█" * 4, "▌", "", "")


def test_sizes_in_words() -> None:
    assert [size_text(size) for size in (8, 1024, 1 << 20, 3 << 19, 1 << 30)] == ["8 B", "1 KiB", "1 MiB", "1.5 MiB", "1 GiB"]
