"""Whatever a file holds, every tool of the registry makes a value of it or a ParseError, and nothing else, soon."""

from __future__ import annotations

import json
import random
import time
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from netcheck.tools import TOOLS
from r4090c.cli.common import to_jsonable
from r4090c.errors import ParseError
from tests.tools.samples import files

LARGE = 2**15
SOON_S = 1.5
"""CPU time for LARGE; what costs the square of the length takes ten times as long."""
PEAK_MIB = 100
NOISE = st.text(max_size=300) | st.binary(max_size=300).map(lambda data: data.decode("utf-8", "replace"))
PIECES = (
    "",
    " ",
    "\t",
    "\n",
    "-",
    "0",
    "9",
    "-1",
    "nan",
    "1e999",
    "9" * 40,
    "0-4294967295",
    "N/A",
    "ERR!",
    "[N/A]",
    ",",
    ":",
    "/",
    "٣",
    "�",
    "\x1b[4m",
    '"',
    "{",
    "]",
    "null",
    "true",
)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
SAMPLES = {tool: [path.read_bytes().decode("utf-8", "replace") for path in files(tool)] for tool in TOOLS}
every_tool = pytest.mark.parametrize("tool", sorted(TOOLS))


def read(tool: str, text: str) -> object:
    """Return what the parser says as JSON would hold it, None when it refuses."""
    try:
        value = TOOLS[tool].parse(text)
    except ParseError as error:
        assert str(error).strip()
        return None
    return json.loads(json.dumps(to_jsonable(value), allow_nan=False))


@every_tool
@quick
@given(text=NOISE)
def test_any_bytes(tool: str, text: str) -> None:
    read(tool, text)


@every_tool
@quick
@given(data=st.data())
def test_damaged_fixtures(tool: str, data: st.DataObject) -> None:
    """Cut anywhere; lines dropped, doubled, swapped, joined; characters and words replaced; several of these at once."""
    text = data.draw(st.sampled_from(SAMPLES[tool]))
    for _ in range(data.draw(st.integers(1, 3))):
        how = data.draw(st.sampled_from(("cut", "head", "drop", "double", "swap", "join", "letter", "word", "piece")))
        lines = text.split("\n")
        place, other = data.draw(st.integers(0, len(lines) - 1)), data.draw(st.integers(0, len(lines) - 1))
        if how in ("cut", "head"):
            end = data.draw(st.integers(0, len(text)))
            text = text[:end] if how == "cut" else text[end:]
            continue
        if how == "drop":
            del lines[place]
        elif how == "double":
            lines.insert(other, lines[place])
        elif how == "swap":
            lines[place], lines[other] = lines[other], lines[place]
        elif how == "join":
            lines[place : place + 2] = [" ".join(lines[place : place + 2])]
        else:
            line = lines[place]
            start = data.draw(st.integers(0, len(line)))
            end = {"letter": start + 1, "piece": start, "word": len(line) if " " not in line[start:] else line.index(" ", start)}[
                how
            ]
            lines[place] = line[:start] + data.draw(st.sampled_from(PIECES)) + line[end:]
        text = "\n".join(lines)
    read(tool, text)


@every_tool
def test_every_number_may_be_anything(tool: str) -> None:
    """Each number of each fixture in turn becomes one that does not fit."""
    pick = random.Random(tool)
    for text in SAMPLES[tool]:
        spans = [(start, start + 1) for start, letter in enumerate(text) if letter.isdigit()]
        for start, end in pick.sample(spans, min(60, len(spans))):
            read(tool, text[:start] + pick.choice(PIECES) + text[end:])


@every_tool
def test_headers_without_their_beginning(tool: str) -> None:
    """Each line loses its first words: a column that all others hang on is gone."""
    for text in SAMPLES[tool]:
        lines = text.split("\n")[:60]
        for place, line in enumerate(lines):
            for words in (1, 4, 10, 11):
                rest = line.split(maxsplit=words)[words:]
                read(tool, "\n".join([*lines[:place], f"# {''.join(rest)}", *lines[place + 1 :]]))


HOSTILE = (
    " ",
    "\t",
    "\n",
    "0",
    "9",
    "-",
    "(",
    "[",
    "|",
    ":",
    ",",
    "#",
    "+",
    "\\",
    "=",
    "a",
    "{",
    '{"a":',
    "[",
    "0-8191,",
    "0-4294967295,",
    "8191-0,0-8191,",
    "GPU0 ",
    "GPU0\tX\n",
    "\x1b[",
    "\x1b]",
    "[1,0]<stdout>:",
    "x: y\n",
    "a b ",
    "node 0 cpus:\n",
    "# gpu sm\n",
    "0000:41:00.0 x\n",
    "-[0000:00]-",
    "GPU 00000000:27:00.0\n",
    "nvidia-smi --query-gpu=",
    "    a\n  b\n",
)


@every_tool
def test_large_and_hostile_texts_are_read_soon(tool: str) -> None:
    size = LARGE
    texts = [head + piece * (size // len(piece)) + tail for piece in HOSTILE for head, tail in (("", ""), ("\n", "x\n"))]
    for sample in SAMPLES[tool]:
        lines = sample.splitlines(keepends=True) or [""]
        longest = max(lines, key=len)
        texts += [sample * (size // len(sample)), sample + longest * (size // len(longest))]
    for text in texts:
        started = time.process_time()
        read(tool, text)
        assert time.process_time() - started < SOON_S, text[:200]


@every_tool
def test_memory_is_bounded(tool: str) -> None:
    sample = max(SAMPLES[tool], key=len)
    for text in (
        sample * (2 * LARGE // len(sample) + 1),
        "0-8191," * (LARGE // 4),
        "0-4294967295 " * (LARGE // 8),
        f"{sample}{'0-8191,' * 1000}\n" * 4,
    ):
        tracemalloc.start()
        try:
            read(tool, text)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < PEAK_MIB * 2**20


@every_tool
def test_line_ends_of_another_system(tool: str) -> None:
    for text in SAMPLES[tool]:
        assert read(tool, text.replace("\n", "\r\n")) == read(tool, text)


@pytest.mark.parametrize("tool", sorted(set(TOOLS) - {"proc-mounts"}))
def test_what_a_terminal_adds(tool: str) -> None:
    """To what people copy from a screen; a file and a JSON document are taken as they are."""
    for text in SAMPLES[tool]:
        if text.lstrip().startswith("{"):
            continue
        whole = read(tool, text)
        prompt = f"(base) root@node03:~# {TOOLS[tool].COMMAND}\n"
        if "missing its value" not in text and "--query-gpu" not in prompt:
            assert read(tool, f"{prompt}{text}") == whole
        assert read(tool, f"\n\n{text}\n\n") == whole
        assert read(tool, "".join(f"\x1b[1m{line}\x1b[0m\n" for line in text.split("\n"))) == whole
        assert read(tool, f"\x1b]0;root@node03: ~\x07{text}") == whole
        assert read(tool, f"\ufeff{text}") == whole
