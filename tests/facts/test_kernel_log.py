"""The script that picks the lines out of a kernel log, run with stand-ins of dmesg and journalctl."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from netcheck.facts import kernel_log
from netcheck.facts.question import Output, Reply
from netcheck.tools import kernel_log as parser
from r4090c.errors import ParseError
from r4090c.model import KernelLog

RECORDED = Path(__file__).resolve().parents[1] / "tools" / "fixtures" / "kernel-log"
BOOT = "[    0.000000] Linux version 6.8.0-45-generic (buildd@lcy02) #45-Ubuntu SMP\n"
JOURNAL = (
    "[    0.000000] node02 kernel: Linux version 6.8\n[  100.000000] node02 kernel: NVRM: Xid (PCI:0000:81:00): 79, pid=1, x\n"
)
Run = Callable[[str | None, str | None], Reply]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function (what dmesg prints, what journalctl prints; None = refused) -> the reply."""

    def ask(dmesg: str | None, journal: str | None) -> Reply:
        for program, text in (("dmesg", dmesg), ("journalctl", journal)):
            (tmp_path / f"{program}.txt").write_text(text or "")
            lines = [f"cat {tmp_path}/{program}.txt"] if text is not None else ["echo 'not permitted' >&2", "exit 1"]
            (tmp_path / program).write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
            (tmp_path / program).chmod(0o755)
        argv = ["sh", "-c", kernel_log.SCRIPT]
        done = subprocess.run(argv, capture_output=True, text=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
        return Reply(command=Output(done.returncode, done.stdout, done.stderr, None))

    return ask


@pytest.mark.parametrize("file", sorted(RECORDED.glob("*.txt")), ids=lambda file: file.stem)
def test_no_line_that_the_parser_reads_is_left_behind(run: Run, file: Path) -> None:
    text = BOOT + "[    1.5] usb 1-1: new device\n" * 2000 + file.read_text()
    found = kernel_log.parse(run(text, None))
    assert replace(found, since_s=None) == parser.parse(text) != KernelLog()
    assert found.since_s == 0.0
    assert len(run(text, None).output().stdout.splitlines()) < 60


def test_a_log_without_anything_that_matters_is_a_log(run: Run) -> None:
    assert kernel_log.parse(run(BOOT + "[    1.500000] usb 1-1: new device\n", None)) == KernelLog(since_s=0.0)


def test_what_the_ring_dropped_is_in_the_journal(run: Run) -> None:
    ring = "[90000.000000] usb 1-1: new device\n"
    assert [xid.xid for xid in kernel_log.parse(run(ring, JOURNAL)).xids] == [79]
    alone = kernel_log.parse(run(ring, None))
    assert (alone.xids, alone.since_s) == ((), 90000.0)


def test_the_journal_where_dmesg_is_refused(run: Run) -> None:
    assert [xid.xid for xid in kernel_log.parse(run(None, JOURNAL)).xids] == [79]


@pytest.mark.parametrize("journal", [None, ""])  # an unprivileged journalctl -q prints nothing and ends with 0
def test_neither(run: Run, journal: str | None) -> None:
    with pytest.raises(ParseError, match="not readable as this user"):
        kernel_log.parse(run(None, journal))
