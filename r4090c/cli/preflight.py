"""`r4090c preflight`: are the nodes fit, and if not: which node, what, why, and the command that mends it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from r4090c.cli.common import (
    choose_nodes,
    cluster_option,
    err,
    json_option,
    load,
    nodes_option,
    on_stdout,
    pasteable,
    print_json,
    remember,
    tell_error,
)
from r4090c.errors import Exit, UsageError

if TYPE_CHECKING:
    from netcheck.checks import Check
    from netcheck.diff import Diff
    from netcheck.raw import Raw
    from netcheck.rehearsal import Rehearsal
    from netcheck.report import Outcome
    from r4090c.model import Cluster, Finding, Node, NodeFacts

PLAN_SCHEMA = "r4090c.preflight-plan/1"
FIRST_WORD_S, NEXT_WORDS_S = 10.0, 15.0
"""Seconds without an end after which progress is told on a stderr that is no terminal, and then again. est.: for logs of CI."""


def _words(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for value in values for word in value.replace(",", " ").split())


def _file(option: str, name: str, text: str, metavar: str = "FILE") -> Callable[[Any], Any]:
    return click.option(option, name, metavar=metavar, type=click.Path(dir_okay=False, path_type=Path), help=text)


def level_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--quick` and `--full`."""
    full = click.option(
        "--full", "level", flag_value="full", help="Measure everything: all pairs, all nodes, storage and GPUs (minutes)."
    )
    quick = click.option(
        "--quick", "level", flag_value="quick", help="Facts only (about a second): measure nothing between the nodes."
    )
    return quick(full(function))


@click.command()
@cluster_option
@nodes_option
@level_options
@click.option(
    "--only",
    metavar="GROUP|CHECK",
    multiple=True,
    callback=_words,
    help="Only these groups or checks; repeat or separate by commas.",
)
@click.option("--skip", metavar="CHECK|GROUP", multiple=True, callback=_words, help="Not these.")
@click.option("--diff", "with_diff", is_flag=True, help="Tell what changed since the last preflight that found the cluster fit.")
@click.option("--dry-run", is_flag=True, help="Tell what would be measured, and for how long; only facts are read.")
@_file("--html", "html_file", "Write the report as one HTML page.")
@_file("--junit", "junit_file", "Write the findings as JUnit XML, for CI.")
@_file("--save", "save_file", "Keep every raw answer in FILE (tar.gz, without secrets).")
@_file("--from", "from_file", "Judge a saved FILE offline instead of asking the nodes.")
@click.option("-v", "--verbose", is_flag=True, help="List the passes and skips as well.")
@json_option
def command(
    cluster_file: str | None,
    nodes: str | None,
    level: str | None,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    with_diff: bool,
    dry_run: bool,
    html_file: Path | None,
    junit_file: Path | None,
    save_file: Path | None,
    from_file: Path | None,
    verbose: bool,
    as_json: bool,
) -> int:
    """Say whether the nodes are fit to train, and if not which node, what, why, and the command that mends it.

    Changes nothing on a node. By default neighbours measure with each other (about a minute); --quick reads facts only, --full
    measures all pairs, collectives and load (minutes). `r4090c checks` lists what is looked at.

    \b
    Examples:
      r4090c preflight --quick
      r4090c preflight --full --html report.html --save preflight.tar.gz
      r4090c preflight --full --dry-run             what would be measured, and for how long
      r4090c preflight --only nic,rdma --nodes node[03-04]
      r4090c preflight --diff                       what changed since it was last fit
      r4090c preflight --from preflight.tar.gz      judge again what was saved, offline
      r4090c preflight --quick --junit results.xml --json > report.json      in CI

    \b
    Exit codes: 0 all fit (warnings allowed); 1 a check failed; 3 something could not be told (a node was not reached, a fact
    not read); 2 wrong usage, or all fit but a FILE could not be written. The report is printed before any FILE is written.
    """
    from netcheck.judge import exit_code, judge
    from netcheck.preflight import select_checks

    files = {"--html": html_file, "--junit": junit_file, "--save": save_file}
    checks = select_checks(only, skip)
    _refuse_contradictions(files, from_file, cluster_file, level, dry_run, with_diff)
    started = time.monotonic()
    if from_file is not None:
        cluster, raw, facts = _replay(from_file, nodes)
        chosen = [node for node in cluster.nodes if node.name in raw.reach]
        findings = [] if dry_run else judge(cluster, raw, facts, checks)
    else:
        from r4090c.lockfile import with_lock

        cluster = with_lock(load(cluster_file))
        chosen = list(choose_nodes(cluster, nodes))
        cluster, raw, facts, findings = _ask(cluster, chosen, checks, level or "default", dry_run)
    if dry_run:
        return _rehearse(cluster, raw, facts, chosen, checks, level or "default", verbose, as_json)
    outcome = _outcome(cluster, raw, facts, findings, level if from_file is None else None, time.monotonic() - started)
    whole = not (only or skip) and len(raw.reach) == len(cluster.nodes)
    record = _record(outcome)
    comparison = _compare(outcome, record, from_file is not None) if with_diff else None
    outcome = replace(outcome, diff=comparison.diff if comparison else None)
    code = int(exit_code(findings))
    facts_file = save_file or from_file
    told = on_stdout(lambda: _tell(outcome, comparison, facts_file, verbose, as_json), "r4090c preflight --html FILE")
    code = code or int(told)
    for option, path in files.items():  # after the report: a file that cannot be written must not lose it
        if path is not None:
            try:
                _write(option, path, outcome)
                click.echo(f"{'saved' if option == '--save' else 'written'}: {path}", err=True)
            except UsageError as error:
                tell_error(error)
                code = code or int(error.exit_code)
    if from_file is None:
        from r4090c.store import record_preflight

        kept = [{**asdict(finding), "status": finding.status.value} for finding in findings]
        # Only whole preflights are worth comparing with.
        remember(record_preflight, cluster.name, list(raw.reach), record["verdict"], kept, record if whole else None)
        _remember_p2p(cluster, raw, facts)
        _remember_ports(cluster, raw, facts)
    return code


def _remember_p2p(cluster: Cluster, raw: Raw, facts: Mapping[str, NodeFacts]) -> None:
    """Remember what the two-arm test of P2P showed: `launch` turns P2P on where it was proven."""
    from netcheck.p2p import proofs
    from r4090c.errors import ParseError
    from r4090c.store import record_p2p

    if "p2p" not in raw.measurements:
        return
    try:
        found = proofs(raw.measurements["p2p"], facts, cluster.expect, raw.started_at[:10])
    except ParseError:
        return  # the check says so
    for node, proof in found.items():
        remember(record_p2p, cluster.name, node, proof)


def _remember_ports(cluster: Cluster, raw: Raw, facts: Mapping[str, NodeFacts]) -> None:
    """Remember what the bandwidth test showed of RDMA ports: `launch` leaves out one that failed."""
    from netcheck.measure.rdma import NAME
    from netcheck.port_tests import port_tests
    from r4090c.errors import ParseError
    from r4090c.store import record_ports

    if NAME not in raw.measurements:
        return
    try:
        nets = {name: own.net.value for name, own in facts.items()}
        found = port_tests(raw.measurements[NAME], nets, cluster, raw.started_at[:10])
    except ParseError:
        return  # the check says so
    if found:
        remember(record_ports, cluster.name, found)


def _refuse_contradictions(
    files: Mapping[str, Path | None],
    from_file: Path | None,
    cluster_file: str | None,
    level: str | None,
    dry_run: bool,
    with_diff: bool,
) -> None:
    """Raise UsageError for options that cannot both be meant."""
    if from_file is not None:
        given = {"--save": files["--save"], "--cluster": cluster_file, f"--{level}": None if dry_run else level}
        for option, value in given.items():
            if value:
                raise UsageError(option, "means nothing with --from", "one of the two", f"r4090c preflight --from {from_file}")
    asked = {**files, "--diff": with_diff}
    for option, wanted in asked.items():
        if dry_run and wanted:
            raise UsageError(option, "means nothing with --dry-run", "one of the two", "r4090c preflight --dry-run")
    places: dict[Path, str] = {}
    for option, path in (*files.items(), ("--from", from_file)):
        if path is not None:
            other = places.setdefault(path.absolute(), option)
            if other != option:
                raise UsageError(option, f"writes {path}, and so does {other}", "a file for each", "r4090c preflight --help")


# --------------------------------------------------------------------------- asking and replaying


def _ask(
    cluster: Cluster, chosen: Sequence[Node], checks: Sequence[Check], level: str, dry_run: bool
) -> tuple[Cluster, Raw, dict[str, NodeFacts], list[Finding]]:
    """Ask the nodes over SSH."""
    from netcheck.measure.job import Level
    from netcheck.preflight import read_nodes, run_preflight
    from r4090c.remote import Fleet

    with progress() as told, Fleet(tuple(chosen)) as fleet:
        if dry_run:
            raw, facts = read_nodes(fleet, cluster, chosen, told)
            return cluster, raw, facts, []
        raw, facts, findings = run_preflight(fleet, cluster, chosen, level=Level[level.upper()], checks=checks, progress=told)
    return cluster, raw, facts, findings


def _replay(bundle: Path, nodes: str | None) -> tuple[Cluster, Raw, dict[str, NodeFacts]]:
    """Return what a bundle holds about these nodes."""
    from netcheck.bundle import load_bundle
    from netcheck.raw import parse_raw

    cluster, raw = load_bundle(bundle)
    if nodes is not None:
        names = {node.name for node in choose_nodes(cluster, nodes)}
        raw = replace(raw, reach={name: answer for name, answer in raw.reach.items() if name in names})
    return cluster, raw, parse_raw(raw, cluster)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Give a function that takes a few words about what happens now: a line on stderr that changes or, in a log, now and then.

    Where stderr is no terminal, nothing is said before FIRST_WORD_S.
    """
    if sys.stderr.isatty():
        with err().status("connecting") as status:
            yield status.update
        return
    due = time.monotonic() + FIRST_WORD_S

    def tell(words: str) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + NEXT_WORDS_S
            click.echo(words, err=True)

    yield tell


# --------------------------------------------------------------------------- what came out


def _outcome(
    cluster: Cluster,
    raw: Raw,
    facts: Mapping[str, NodeFacts],
    findings: Sequence[Finding],
    level: str | None,
    duration_s: float,
) -> Outcome:
    from netcheck.figures import figures_of, level_of
    from netcheck.report import Outcome

    figures = figures_of(raw.measurements, raw.reach)
    return Outcome(cluster, raw, facts, findings, figures, level or level_of(raw.measurements), duration_s)


def _record(outcome: Outcome) -> dict[str, Any]:
    from netcheck.diff import record_of

    return record_of(outcome.cluster, outcome.raw, outcome.facts, outcome.findings, outcome.figures, outcome.level)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """What changed, or in `words` why that cannot be told."""

    diff: Diff | None
    words: str = ""


def _compare(outcome: Outcome, record: Mapping[str, Any], replayed: bool) -> _Comparison:
    """Compare with the last fit preflight of the same cluster; of a replayed one, with the last before it."""
    from netcheck.diff import compare, last_good
    from r4090c.errors import ParseError
    from r4090c.store import preflight_records

    name = outcome.cluster.name
    try:
        records = preflight_records(name, before=outcome.raw.started_at if replayed else "")
        earlier = last_good(records, outcome.level)
        if earlier is None:
            return _Comparison(None, f"no earlier preflight that found {name} fit is remembered here: nothing to compare with")
        return _Comparison(compare(earlier, record, records, outcome.cluster))
    except UsageError as error:
        return _Comparison(None, f"cannot be compared with earlier preflights: {error}")
    except ParseError as error:
        return _Comparison(None, f"the last fit preflight of {name} is not understood: {error}")


def _tell(outcome: Outcome, comparison: _Comparison | None, facts_file: Path | None, verbose: bool, as_json: bool) -> None:
    """Print the report on stdout."""
    from netcheck.diff import told
    from netcheck.figures import matrices
    from netcheck.report import Line, report, screen

    name, raw, findings = outcome.cluster.name, outcome.raw, outcome.findings
    if as_json:
        more = {"diff": asdict(comparison.diff) if comparison.diff else None} if comparison else {}
        file = str(facts_file) if facts_file else None
        print_json(
            report(
                name,
                raw.started_at,
                outcome.duration_s,
                findings,
                file,
                level=outcome.level,
                figures=outcome.figures,
                **more,
            )
        )
        if comparison and comparison.words:
            click.echo(comparison.words, err=True)
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    shown = matrices(outcome.figures, list(raw.reach))
    lines = screen(name, list(raw.reach), outcome.duration_s, findings, width=width, verbose=verbose, matrices=shown)
    if comparison:
        lines.append(Line(""))
        changes = told(comparison.diff) if comparison.diff else [("yellow", comparison.words)]
        lines += [Line(text, colour) for colour, text in changes]
    print_lines(lines)


def print_lines(lines: Sequence[Any], *, to_stderr: bool = False) -> None:
    """Print the lines (netcheck.report.Line) on stdout or stderr, in colour where that is a terminal."""
    terminal = (sys.stderr if to_stderr else sys.stdout).isatty()
    for line in lines:
        styled = click.style(
            pasteable(line.text),
            fg=line.colour or None,
            bold=line.strength == "bold" or None,
            dim=line.strength == "dim" or None,
        )
        click.echo(styled, err=to_stderr, color=terminal and not os.environ.get("NO_COLOR"))


def _write(option: str, path: Path, outcome: Outcome) -> None:
    """Write one of the files. Raises UsageError when it cannot be written."""
    from r4090c.files import write_whole

    if option == "--save":
        from netcheck.bundle import save_bundle

        save_bundle(path, outcome.cluster, outcome.raw)
        return
    shown = replace(outcome, findings=_to_be_shared(outcome.cluster, outcome.findings))
    if option == "--html":
        from netcheck.report_html import page

        text = page(shown)
    else:
        from netcheck.report_junit import junit

        text = junit(shown.cluster.name, shown.raw.started_at, shown.duration_s, shown.findings)
    write_whole(path, text.encode("utf-8", "replace"))


def _to_be_shared(cluster: Cluster, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings for a file that others will read: remedies for this cluster, no tokens that a node printed."""
    from netcheck.bundle import cleaner

    clean = cleaner(cluster)
    return [
        replace(
            finding,
            observed=clean(finding.observed, True),
            expected=clean(finding.expected, True),
            why=clean(finding.why, True),
            remedy=pasteable(finding.remedy),
        )
        for finding in findings
    ]


# --------------------------------------------------------------------------- --dry-run


def _rehearse(
    cluster: Cluster,
    raw: Raw,
    facts: Mapping[str, NodeFacts],
    chosen: Sequence[Node],
    checks: Sequence[Check],
    level: str,
    verbose: bool,
    as_json: bool,
) -> int:
    """Print what would be measured; return the exit code."""
    from netcheck.judge import reached
    from netcheck.measure.job import Level, Setting
    from netcheck.preflight import wanted_measurements
    from netcheck.rehearsal import lasts, rehearse
    from r4090c.store import preflight_records

    depth = Level[level.upper()]
    alive = [node for node in chosen if node.name in reached(raw.reach)]
    silent = [node.name for node in chosen if node not in alive]
    records: list[dict[str, Any]] = []
    with contextlib.suppress(UsageError):  # then only the limits can be told
        records = preflight_records(cluster.name)
    setting = Setting(tuple(alive), facts, cluster, depth)
    planned = list(rehearse(setting, wanted_measurements(checks, depth, alive, cluster), records))
    code = int(Exit.OK if alive else Exit.UNKNOWN)
    if as_json:
        head = {"schema": PLAN_SCHEMA, "cluster": cluster.name, "level": level, "nodes": [node.name for node in alive]}
        print_json({**head, "not_reached": silent, "checks": [check.id for check in checks], "measurements": planned})
        return code
    told = f" ({', '.join(silent)} did not answer)" if silent else ""
    facts_only = sum(check.scope != "measurement" for check in checks)
    click.echo(
        f"{cluster.name}, level {level}, {len(alive)} node{'s' if len(alive) != 1 else ''}{told}: {facts_only} checks over facts"
    )
    for one in planned:
        click.echo(f"  {one.name:<12} {one.title:<32} {_size(one)}")
        for number, names in enumerate(one.rounds if verbose else (), 1):
            click.echo(f"    round {number}: {', '.join(names)}")
    if planned:
        known = [one.about_s for one in planned if one.about_s is not None]
        about = f"about {lasts(sum(known))}, " if len(known) == len(planned) else ""
        click.echo(f"  in all {about}at most {lasts(sum(one.at_most_s for one in planned))}; suspects are tested again on top")
    else:
        click.echo("  nothing is measured")
    return code


def _size(one: Rehearsal) -> str:
    """Return how much a measurement does, and for how long."""
    from netcheck.rehearsal import lasts

    jobs = sum(map(len, one.rounds))
    if not jobs:
        return "nothing to measure here"
    size = f"{len(one.rounds)} round{'s' if len(one.rounds) != 1 else ''}, {jobs} job{'s' if jobs != 1 else ''}"
    return f"{size:<22} {f'{lasts(one.last_s)} the last time' if one.last_s is not None else f'at most {lasts(one.at_most_s)}'}"
