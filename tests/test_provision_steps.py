"""Managed blocks: whatever a file holds, putting a block in and taking it out again gives back every byte."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from provision.steps import (
    PROCEDURES,
    BlockError,
    begin_line,
    drop_block,
    end_line,
    find_blocks,
    other_titles,
    put_block,
    without_any_block,
)

TITLE, OTHER = "ssh-trust (cluster atelier)", "ssh-trust (cluster other)"
OTHER_BLOCK = f"{begin_line(OTHER)}\n# note: newline-added\nnode9 ssh-ed25519 AAAA\n{end_line(OTHER)}\n".encode()

pieces = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            b"\n",
            b"\r\n",
            b"\r",
            b"Host *\r\n  Port 9\r\n",
            b"# r4090c\n",
            b"ssh-ed25519 AAAA me",
            b"# note: file-made\n",
            OTHER_BLOCK,
        ]
    ),
    st.sampled_from([f"{end_line(TITLE)}\n".encode(), f" {begin_line(TITLE)}\n".encode(), f"{begin_line(TITLE)} \n".encode()]),
)
contents = st.lists(pieces, max_size=6).map(b"".join)
bodies = st.lists(st.sampled_from(["node1 ssh-ed25519 AAAA", "Host node1", "    Port 2", "x"]), min_size=1, max_size=4)


def block(*lines: str, end: str = "\n") -> bytes:
    return end.join([begin_line(TITLE), *lines, end_line(TITLE), ""]).encode()


@given(contents, bodies, st.booleans())
@example(b"", ["x"], False)
@example(b"no newline at the end", ["x"], False)
@example(b"no newline at the end", ["x"], True)
@example(b"a\r\nb\r\n", ["x"], False)
@example(b"a\r", ["x"], False)
@example(b"\n\n", ["x"], False)
def test_put_then_drop_gives_back_every_byte(content: bytes, body: list[str], top: bool) -> None:
    if any(line.removesuffix(b"\r") == begin_line(TITLE).encode() for line in content.split(b"\n")):
        return  # the file has a block of ours already: the next test
    put = put_block(content, TITLE, body, top=top)
    assert drop_block(put, TITLE) == content
    assert content in (put[put.index(end_line(TITLE).encode()) + len(end_line(TITLE)) + 1 :], put[: len(content)])
    (found,) = find_blocks(put, TITLE)
    assert list(found.body) == body
    assert put_block(put, TITLE, body, top=top) == put


@given(contents, contents, bodies, bodies, st.booleans(), st.booleans())
def test_an_old_block_is_replaced_where_it_stands_and_dropped_as_if_it_had_been_the_new_one(
    before: bytes, after: bytes, old: list[str], new: list[str], crlf: bool, top: bool
) -> None:
    before += b"" if not before or before.endswith(b"\n") else b"\n"
    content = before + block(*old, end="\r\n" if crlf else "\n") + after
    try:
        blocks = find_blocks(content, TITLE)
    except BlockError:
        return  # the random text began a block
    put = put_block(content, TITLE, new, top=top)
    if len(blocks) == 1:
        assert put == before + block(*new) + after
        assert drop_block(put, TITLE) == before + after
    assert drop_block(put, TITLE) == drop_block(content, TITLE)


@given(st.one_of(st.none(), contents), bodies)
def test_a_file_that_did_not_exist_is_told_from_an_empty_one(content: bytes | None, body: list[str]) -> None:
    try:
        put = put_block(content, TITLE, body)
    except BlockError:
        return
    if content is None:
        assert drop_block(put, TITLE) is None
        assert drop_block(put + b"somebody wrote on\n", TITLE) == b"somebody wrote on\n"
    else:
        assert drop_block(put, TITLE) is not None


def test_what_was_written_after_the_block_is_not_joined_to_the_line_before_it() -> None:
    put = put_block(b"no newline", TITLE, ["x"])
    assert drop_block(put + b"later\n", TITLE) == b"no newline\nlater\n"


def test_a_block_whose_end_was_lost_is_refused_not_guessed() -> None:
    for content in (begin_line(TITLE).encode(), block("x")[:-5] + b"\nmore\n", block("x") + begin_line(TITLE).encode()):
        with pytest.raises(BlockError):
            put_block(content, TITLE, ["y"])
        with pytest.raises(BlockError):
            drop_block(content, TITLE)
    with pytest.raises(BlockError, match=r"begins .* again"):
        find_blocks(f"{begin_line(TITLE)}\n{begin_line(TITLE)}\n{end_line(TITLE)}\n".encode(), TITLE)


def test_a_file_that_was_pasted_twice_keeps_one_block() -> None:
    content = b"a\n" + block("x") + b"a\n" + block("x")
    assert put_block(content, TITLE, ["y"]) == b"a\n" + block("y") + b"a\n"
    assert drop_block(content, TITLE) == b"a\na\n"


def test_other_clusters_blocks_are_seen_and_left_alone() -> None:
    content = put_block(OTHER_BLOCK, TITLE, ["x"])
    assert other_titles(content, TITLE) == [OTHER]
    assert without_any_block(b"mine\n" + content) == b"mine\n"
    assert drop_block(content, TITLE) == OTHER_BLOCK


@given(st.binary(max_size=400))
def test_any_bytes_are_blocks_or_a_block_error(content: bytes) -> None:
    with suppress(BlockError):
        find_blocks(content, TITLE)
    without_any_block(content)


def test_every_procedure_has_a_planner_with_its_help_and_a_runner() -> None:
    apply = import_module("provision.apply")
    for row in PROCEDURES.values():
        assert import_module(row.planner).ABOUT.strip()
        assert callable(getattr(apply, row.runner))
