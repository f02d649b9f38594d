"""`r4090c top`: the picture at two widths (golden; write anew: python -m tests.test_top), and the command without a terminal."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from launch.live import Heard, Snapshot, snapshot
from r4090c.cli.top_view import bar, clean, duration, fits, frame
from tests.cli import run
from tests.launch.live_samples import AT_S, HOSTILE, NOW_S, RUN, cluster_of_three, down, gpu_row, heard, smi, state

GOLDEN = Path(__file__).parent / "golden" / "top"


def picture(view: Snapshot, width: int, height: int | None = None, offset: int = 0, detail: bool | None = None) -> str:
    """Return the picture as a terminal without colours gets it."""
    written = io.StringIO()
    console = Console(file=written, width=width, color_system=None, highlight=False)
    for line in frame(view, width, height, detail=detail, offset=offset):
        console.print(line, soft_wrap=True)
    return written.getvalue()


@pytest.fixture(autouse=True)
def utc() -> Iterator[None]:
    """Have the clock in the header be the same everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def three() -> Snapshot:
    return snapshot("lab", cluster_of_three(), 2.0, now_s=AT_S, time_s=NOW_S)


def many() -> Snapshot:
    """Return sixteen nodes with eight GPUs each, one of them lost."""
    rows = [gpu_row(index, 12 * index, 20_000, 400.0, 60 + index, 0x4 if index == 7 else 0, "x") for index in range(8)]
    nodes: list[Heard] = [heard(f"node{number:02d}", gpus=smi(*rows), apps={"error": "x"}) for number in range(1, 16)]
    nodes[0] = heard("node01", gpus=smi(*rows), runs=[state(RUN, "node01", 0, {0: ("train", 42, 0.4)})])
    return snapshot("big", [*nodes, down("node16")], 2.0, now_s=AT_S, time_s=NOW_S)


PICTURES: dict[str, Callable[[], str]] = {
    "three-80.txt": lambda: picture(three(), 80, 40),
    "three-160.txt": lambda: picture(three(), 160),
    "three-80x12.txt": lambda: picture(three(), 80, 12),
    "many-80x24.txt": lambda: picture(many(), 80, 24),
    "empty-80.txt": lambda: picture(snapshot("lab", [Heard("node01", since_s=NOW_S)], 2.0, now_s=AT_S, time_s=NOW_S), 80),
}


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture(name: str) -> None:
    assert PICTURES[name]() == (GOLDEN / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [20, 40, 80, 119, 120, 200])
@pytest.mark.parametrize("height", [4, 10, 24, 60, None])
@pytest.mark.parametrize("view", [three(), many()], ids=["three", "many"])
def test_it_always_fits_the_terminal(view: Snapshot, width: int, height: int | None) -> None:
    for offset in (0, 3, 10_000):
        lines = frame(view, width, height, offset=offset)
        assert all(cell_len(line.plain) <= width for line in lines)
        assert height is None or len(lines) <= height
        assert all(letter.isprintable() for line in lines for letter in line.plain)


def test_what_others_wrote_is_shown_and_does_nothing() -> None:
    """Neither markup nor escape sequences of a path, a GPU or a run reach the terminal."""
    told = state(HOSTILE, "node01", 0, {0: (HOSTILE, 1, 0.1)})
    told["plan"] = {**told["plan"], "recipe": HOSTILE, "nodes": [HOSTILE]}
    view = snapshot(HOSTILE, [*cluster_of_three(), heard("node04", runs=[told])], 2.0, now_s=AT_S, time_s=NOW_S)
    shown = picture(view, 300)
    assert "[red]bold[/red]" in shown
    assert not set(shown) & {"\x1b", "\x07", "\u202e", "\r"}
    assert clean("a\x1b[2Jb\u202ec\nd\te") == "a�[2Jb�c�d�e"


def test_scrolling_shows_every_line() -> None:
    seen: dict[str, None] = {}
    for offset in range(200):
        seen.update(dict.fromkeys(picture(many(), 80, 24, offset=offset, detail=True).splitlines()[1:-1]))
    assert len([line for line in seen if line.startswith("node")]) == 16
    assert not fits(many(), 80, 24) and fits(three(), 80, 40)
    assert "0 below" in picture(many(), 80, 24, offset=10_000, detail=True)


def test_what_is_not_known_is_no_bar_of_zero() -> None:
    assert bar(None, 4, "green").plain == "····" and bar(0.0, 4, "green").plain == "░░░░" and bar(7.0, 4, "green").plain == "████"


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "?"), (0.4, "0 s"), (192, "3 m 12 s"), (7_500, "2 h 05 m"), (273_600, "3 d 4 h")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_run_that_is_slow_but_even_has_nobody_behind() -> None:
    first, second, _ = cluster_of_three()
    even = state(RUN, "node02", 1, {2: ("train", 42, 0.5), 3: ("train", 41, 1.0)})
    view = snapshot("lab", [first, replace(second, last=heard("node02", runs=[even]).last)], 2.0, now_s=AT_S, time_s=NOW_S)
    assert "behind" not in picture(view, 160)


# ------------------------------------------------------------------------------------------ the command


def test_nobody_answers_is_exit_code_3_and_says_why(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    nodes = "nodes: [{name: node01, address: 127.0.0.1, gpus: 0}]"
    file.write_text(f"name: gone\n{nodes}\nssh: {{user: x, port: 1}}\npaths: {{shared: /x, python: /y}}\n")
    code, output, errors = run("--cluster", str(file), "top", "--once", state=tmp_path)
    assert code == 3 and "node01  no answer" in output and "refused" in output, (code, output, errors)
    code, output, _ = run("--cluster", str(file), "top", "--once", "--json", state=tmp_path)
    assert code == 3 and '"up": false' in output and len(output.splitlines()) == 1


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"
    time.tzset()
    GOLDEN.mkdir(exist_ok=True)
    for _name, _draw in PICTURES.items():
        (GOLDEN / _name).write_text(_draw(), encoding="utf-8")
