"""`r4090c diagnose`: name the first cause in logs of any launcher, or of a run of ours."""

from __future__ import annotations

import gzip
import shlex
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from r4090c.cli.common import cluster_option, json_option, load, pasteable, print_json, styled
from r4090c.errors import Exit, UsageError

if TYPE_CHECKING:
    from launch.diagnose_log import Source

SCHEMA = "r4090c.diagnose/1"
STDIN = "-"
GZIP = b"\x1f\x8b"
SUFFIXES = (".log", ".out", ".err", ".txt", ".gz")
"""Files of a folder that are taken for logs."""
MOST_FILES = 1024
EXPLAINED_SHOWN = 8
NAME_MOST = 200
"""Characters of a name that is none."""
SHOWN_MOST = 600
"""Characters of a line that is shown."""


@dataclass
class Answer:
    """What is printed. `verdict`: cause, healthy, running, unknown. `why`: of a verdict without a cause."""

    verdict: str
    why: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    kind: str | None = None
    summary: str = ""
    node: str | None = None
    rank: int | None = None
    gpu: int | None = None
    file: str | None = None
    line: int | None = None
    evidence: str = ""
    explains: Sequence[str] = ()
    also: Sequence[str] = ()
    earlier: Sequence[str] = ()
    fix: Sequence[str] = ()
    next_command: str = ""
    details: dict[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> Exit:
        """The exit code of the command."""
        return {"cause": Exit.FAILED, "unknown": Exit.UNKNOWN}.get(self.verdict, Exit.OK)


@click.command("diagnose")
@click.argument("what", metavar="LOG…|RUN", nargs=-1, required=True)
@click.option("--attempt", type=click.IntRange(1), help="Of a RUN: an earlier attempt [default: the last].")
@cluster_option
@json_option
def command(what: tuple[str, ...], attempt: int | None, cluster_file: str | None, as_json: bool) -> int:
    """Name the first cause of a failure: what proves it, where it happened, and what mends it.

    LOG is what a run printed, of any launcher: a file (gzip too), a folder of logs, or - for standard input; give the logs of all
    ranks together. RUN is a run of this cluster, as `r4090c jobs` shows it. What exists as a file is a LOG.

    \b
    Examples:
      r4090c diagnose train.log
      r4090c diagnose logs/rank*.log node03-dmesg.txt
      torchrun … 2>&1 | tee train.log | r4090c diagnose -
      r4090c diagnose tiny-20260131-120000-a1b2 --attempt 1

    \b
    Exit codes: 0 no cause, it ended well or goes on; 1 a cause was found; 2 usage, or a file that cannot be read; 3 not known.
    """
    if len(what) == 1 and what[0] != STDIN and not _is_there(what[0]):
        answer = _of_run(what[0], attempt, cluster_file)
    else:
        if attempt is not None:
            raise UsageError("--attempt", "given with a log", "the id of a run", "r4090c jobs")
        answer = _of_logs(what)
    if as_json:
        _print_json(answer)
    else:
        _print(answer)
    return answer.exit_code


# --------------------------------------------------------------------------- logs


def _of_logs(what: Sequence[str]) -> Answer:
    from launch.diagnose_log import diagnose_all

    names = _files(what)
    sources = _read(names)
    about = {"logs": [source.name for source in sources]}
    found = diagnose_all(sources)
    cause = found.cause
    if cause is not None:
        return Answer(
            "cause",
            about=about,
            kind=cause.kind,
            summary=cause.summary,
            node=cause.node,
            rank=cause.rank,
            gpu=cause.gpu,
            file=cause.source,
            line=cause.line_number,
            evidence=cause.evidence,
            explains=cause.consequences,
            also=cause.also,
            earlier=found.earlier,
            fix=cause.fix,
            next_command=cause.fix[0] if cause.fix else "",
            details=dict(cause.details),
        )
    if found.ended_well:
        return Answer("healthy", "it ended well", about, earlier=found.earlier)
    empty = not any(source.text.strip() for source in sources)
    why = "nothing is written there" if empty else "no line names a cause, and none tells that it ended well"
    more = (
        "it may be cut, still be written, or have been killed from outside: give the logs of all ranks, and the kernel's (dmesg)"
    )
    return Answer("unknown", f"{why}; {more}", about, earlier=found.earlier)


def _is_there(name: str) -> bool:
    try:
        return Path(name).exists()
    except OSError:  # as when a whole log was given in place of its name
        return False


def _files(what: Sequence[str]) -> list[str]:
    """Return the names of all logs: a folder stands for those in it. Raises UsageError for what is not there."""
    names: list[str] = []
    for name in what:
        path = Path(name)
        if name == STDIN:
            names.append(name)
        elif path.is_dir():
            attempts = [one for one in path.glob("attempt_*") if one.name.removeprefix("attempt_").isdecimal()]
            last = max(attempts, key=lambda one: int(one.name.removeprefix("attempt_")), default=path)  # of a run's folder
            inside = sorted(str(one) for one in last.iterdir() if one.name.endswith(SUFFIXES) and one.is_file())
            if not inside:
                raise UsageError(name, "a folder without logs", f"files that end in {', '.join(SUFFIXES)}", "name the files")
            names += inside
        elif _is_there(name) and (path.is_char_device() or path.is_block_device()):
            raise UsageError(name, "a device", "a log; - is standard input", "r4090c diagnose --help")
        elif _is_there(name):
            names.append(name)
        else:
            raise UsageError(name[:NAME_MOST], "no such file", "logs, or the id of one run alone", "r4090c diagnose --help")
    names = list(dict.fromkeys(names))
    if len(names) > MOST_FILES:
        raise UsageError(f"{len(names)} files", "too many", f"at most {MOST_FILES}", "give those of the ranks that ended first")
    return names


def _read(names: Sequence[str]) -> list[Source]:
    """Return the texts of the logs, of large ones the beginning and the end, with a notice."""
    from launch.diagnose_log import Source
    from launch.log_files import read_bounded, share_of, whose

    sources = []
    for name in names:
        shown = "standard input" if name == STDIN else name
        try:
            with _opened(name) as stream:
                read = read_bounded(stream, share_of(len(names)))
        except (OSError, EOFError, zlib.error) as error:
            said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            expected = "a file that can be read; of a gzip file that was cut: zcat FILE | r4090c diagnose -"
            raise UsageError(
                shown, said, expected, f"ls -l {shlex.quote(name)}" if name != STDIN else "r4090c diagnose FILE"
            ) from None
        if read.skipped_bytes:
            first, lines = read.gap
            size = f"{read.skipped_bytes / 2**20:.0f} MiB"
            click.echo(f"{shown}: {size} in the middle were not looked at (lines {first + 1} to {first + lines})", err=True)
        node, rank = (None, None) if name == STDIN else whose(str(Path(name).absolute()))
        sources.append(Source(read.text, name=shown, node=node, rank=rank, gap=read.gap))
    return sources


@contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    """Open a log, or standard input, as bytes; what is compressed by gzip as what it holds."""
    if name == STDIN and sys.stdin.isatty():
        click.echo("reading from the terminal; end with Ctrl-D", err=True)
    with open(0 if name == STDIN else name, "rb", closefd=name != STDIN) as stream:
        if stream.peek(2)[:2] != GZIP:
            yield stream
            return
        with gzip.open(stream, "rb") as unpacked:
            yield unpacked  # type: ignore[misc]


# --------------------------------------------------------------------------- a run


def _of_run(run_id: str, attempt: int | None, cluster_file: str | None) -> Answer:
    from launch.diagnose_run import diagnose_run
    from launch.jobs import find_run
    from r4090c.remote import Fleet

    try:
        cluster = load(cluster_file)
    except UsageError as error:
        why = f"no such file, and to look for a run of that name: {error.culprit}: {error.observed}"
        raise UsageError(run_id[:NAME_MOST], why, "a log, or a run of a cluster", "r4090c --cluster FILE jobs") from None
    with Fleet(cluster.nodes) as fleet:
        try:
            run = find_run(fleet, cluster, run_id)
        except UsageError as error:
            why = f"no such file in {Path.cwd()}, and no run: {error.observed}"
            raise UsageError(run_id[:NAME_MOST], why, "a log, or a run of this cluster", "r4090c jobs") from None
        number = attempt or run.attempt
        if number > run.attempt:
            raise UsageError(
                f"--attempt {number}", f"{run.id} has {run.attempt} attempts", f"1 to {run.attempt}", f"r4090c jobs   ({run.id})"
            )
        found = diagnose_run(fleet, run, number)
    about = {"run": run.id, "attempt": number, "attempts": run.attempt, "state": found.state}
    cause = found.cause
    if cause is None:
        logs = f"r4090c logs {run.id} --attempt {number}"
        verdict, why = {
            "done": ("healthy", "it ended well"),
            "running": ("running", "it goes on"),
        }.get(found.state, ("unknown", f"no agent told why it ended, and no log does; {logs}"))
        return Answer(verdict, why, about)
    proof = found.proof
    return Answer(
        "cause",
        about=about,
        kind=cause.kind,
        summary=cause.summary,
        node=None if cause.node == "?" else cause.node,
        rank=cause.rank,
        file=proof.file if proof else None,
        line=proof.line_number if proof else None,
        evidence=proof.text if proof else cause.evidence,
        explains=found.consequences,
        fix=cause.fix or ((cause.next_command,) if cause.next_command else ()),
        next_command=cause.next_command,
    )


# --------------------------------------------------------------------------- output


def _print_json(answer: Answer) -> None:
    from launch.diagnose import why_mends

    mends, why = why_mends(answer.kind) if answer.kind else (None, None)
    print_json(
        {
            "schema": SCHEMA,
            "verdict": answer.verdict,
            "why": answer.why or None,
            **answer.about,
            **{name: getattr(answer, name) for name in ("kind", "node", "rank", "gpu", "summary", "file", "line", "evidence")},
            **{name: getattr(answer, name) for name in ("explains", "also", "earlier", "fix", "next_command", "details")},
            "mends": mends,
            "mends_why": why,
        }
    )


def _print(answer: Answer) -> None:
    if answer.kind is None:
        told = {"unknown": ("not known", "yellow")}.get(answer.verdict, ("no cause", "green"))
        click.echo(f"{styled(told[0], fg=told[1], bold=True)}: {pasteable(_plain(answer.why))}")
        _row("earlier", map(_plain, answer.earlier))
        return
    from launch.diagnose import why_mends

    mends, why = why_mends(answer.kind)
    where = [
        *([answer.node] if answer.node else []),
        *([f"rank {answer.rank}"] if answer.rank is not None else []),
        *([f"GPU {answer.gpu}"] if answer.gpu is not None else []),
    ]
    place = f"{answer.file}:{answer.line}" if answer.file and answer.line else answer.file
    again = {"again": "may help", "other-node": "helps without that node", "never": "does not help"}[mends]
    _row("cause", [f"{styled(answer.kind, fg='red', bold=True)}: {_plain(answer.summary)}"])
    _row("where", [_plain(", ".join(where))] if where else [])
    _row(
        "proof",
        [_plain(place), *map(_plain, answer.evidence.splitlines())] if place else map(_plain, answer.evidence.splitlines()),
    )
    for name, shown in (("explains", answer.explains), ("also", answer.also)):
        more = len(shown) - EXPLAINED_SHOWN
        _row(name, [*map(_plain, shown[:EXPLAINED_SHOWN]), *([f"and {more} more"] if more > 0 else [])])
    _row("earlier", map(_plain, answer.earlier))
    _row("fix", [pasteable(_plain(one)) for one in answer.fix])
    _row("again", [f"{again}: {why}"])


def _row(name: str, lines: Any) -> None:
    """Print one heading with its lines beside it."""
    for number, line in enumerate(lines):
        click.echo(f"{name if number == 0 else '':<9} {line}")


def _plain(text: str) -> str:
    """Return text of a log from anywhere, as a terminal may show it."""
    return "".join(letter if letter.isprintable() else " " for letter in text.replace("\t", " "))[:SHOWN_MOST]
