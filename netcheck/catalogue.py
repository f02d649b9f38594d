"""What every check looks at and expects, told from the checks themselves: for `r4090c checks` and docs/checks.md. Pure.

Nothing is written twice: what a check tells is the first line of its module, what it expects its RULE with the thresholds of
Expect filled in, a threshold's source the docstring of its field, and its remedies the commands in its source.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter

from netcheck.checks import REGISTRY, Check
from r4090c.inventory import threshold_descriptions
from r4090c.model import Expect

ON_REQUEST = "on request"
"""What stands for the level of a check that runs only when `--only` names it."""
LEVELS = ("quick", "default", "full", ON_REQUEST)
REMEDY = 6
"""Place of the remedy among the arguments of Finding."""
DEPTH_MAX = 8
"""Names and calls followed from a remedy to its text; est., a real one takes three."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """One field of Expect a check goes by. `origin`: "default" or "cluster.yaml"; `source`: what its docstring says."""

    name: str
    value: object
    origin: str
    source: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One check as a person wants to know it. `level`: one of LEVELS. `remedies`: what it proposes, with {…} for what varies."""

    id: str
    group: str
    level: str
    what: str
    rule: str
    source: str
    measurement: str
    thresholds: tuple[Threshold, ...]
    remedies: tuple[str, ...]


def catalogue(expect: Expect, origins: Mapping[str, str], checks: Sequence[Check] = REGISTRY) -> tuple[Entry, ...]:
    """Return one Entry a check, in the order of the report. `origins`: threshold -> where it was overridden."""
    sources = threshold_descriptions()
    entries = []
    for check in checks:
        module = _module_of(check)
        named = dict.fromkeys((*fields_of(check.rule), *_looked_at(module, sources)))
        entries.append(
            Entry(
                id=check.id,
                group=check.group,
                level=ON_REQUEST if check.asked else check.level.word,
                what=check.what,
                rule=filled(check.rule, expect),
                source=check.source,
                measurement=check.needs[0] if check.scope == "measurement" else "",
                thresholds=tuple(
                    Threshold(name, getattr(expect, name), origins.get(name, "default"), sources.get(name, "")) for name in named
                ),
                remedies=tuple(_remedies(module)),
            )
        )
    return tuple(entries)


def fields_of(rule: str) -> list[str]:
    """Return the fields of Expect that stand in a rule. Raises ValueError for a rule that is no format string."""
    return [name for _, name, _, _ in Formatter().parse(rule) if name]


def filled(rule: str, expect: Expect) -> str:
    """Return `rule` with the thresholds of `expect` in the places of their names. Raises AttributeError for an unknown one."""
    told = []
    for text, name, form, _ in Formatter().parse(rule):
        told.append(text)
        if name:
            told.append(shown(getattr(expect, name), form or ""))
    return "".join(told)


def shown(value: object, form: str = "") -> str:
    """Return a threshold as text: a version as "3.8", a number without needless digits, None as "not stated", true and false."""
    if value is None or isinstance(value, bool):
        return "not stated" if value is None else str(value).lower()
    if isinstance(value, tuple):
        return ("." if all(isinstance(part, int) for part in value) else ", ").join(map(str, value))
    if isinstance(value, float) and not form:
        form = "g"
    return format(value, form)


def markdown(entries: Sequence[Entry]) -> str:
    """Return docs/checks.md: what is checked at which level, each check with its rule, source, thresholds and remedies."""
    lines = [
        "# The checks of `r4090c preflight`",
        "",
        "Made by `r4090c checks --markdown > docs/checks.md`; a test fails when it is stale. `r4090c checks` shows the same",
        "with the thresholds of your cluster.yaml filled in, `r4090c checks ID` one check in full with the remedies it proposes.",
        "",
        f"{len(entries)} checks. Level: `quick` reads facts (about a second), `default` adds what neighbours measure,",
        f"`full` all pairs, collectives and load; `{ON_REQUEST}` runs only when `--only` names it. est. = our estimate for this",
        "class of machine: `expect:` in cluster.yaml overrides each threshold, and findings say when it did.",
        "",
    ]
    for group, members in grouped(entries).items():
        lines += [f"## {group}", "", "| check | level | tells | expected | source |", "|---|---|---|---|---|"]
        lines += [
            f"| `{entry.id}` | {entry.level} | {_cell(entry.what)} | {_cell(entry.rule)} | {_cell(entry.source)} |"
            for entry in members
        ]
        lines.append("")
    thresholds = {one.name: one for entry in entries for one in entry.thresholds}
    users = {name: [entry.id for entry in entries if name in {one.name for one in entry.thresholds}] for name in thresholds}
    lines += ["## Thresholds", "", "| under `expect:` | default | source | used by |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {_cell(shown(one.value))} | {_cell(one.source)} | {', '.join(f'`{user}`' for user in users[name])} |"
        for name, one in sorted(thresholds.items())
    ]
    return "\n".join(lines) + "\n"


def grouped(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return group -> its checks, both in the order of the report."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.group, []).append(entry)
    return groups


def _cell(text: str) -> str:
    """Return text that stays within a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


# --------------------------------------------------------------------------- what a module's source tells


def _module_of(check: Check) -> ast.Module:
    module = inspect.getmodule(check.judge)
    assert module is not None
    return ast.parse(inspect.getsource(module))


def _looked_at(module: ast.Module, known: Mapping[str, str]) -> Iterator[str]:
    """Yield the thresholds a module reads: `expect.nofile_min`, `cluster.expect.nofile_min`, `origin(cluster, "nofile_min")`."""
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and node.attr in known and re.search(r"\bexpect$", ast.unparse(node.value)):
            yield node.attr
        elif isinstance(node, ast.Constant) and node.value in known:
            yield str(node.value)


def _remedies(module: ast.Module) -> list[str]:
    """Return what a module proposes as remedies, as far as its source tells, each once."""
    values: dict[str, list[ast.expr]] = {}
    functions: dict[str, list[ast.expr]] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name, value in _assigned(target, node.value):
                    values.setdefault(name, []).append(value)
        elif isinstance(node, ast.FunctionDef):
            returned = [one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value is not None]
            functions[node.name] = returned
    found: dict[str, None] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
            given = node.args[REMEDY : REMEDY + 1] + [word.value for word in node.keywords if word.arg == "remedy"]
            for expression in given:
                found.update(dict.fromkeys(_texts(expression, values, functions, DEPTH_MAX)))
    return [text for text in found if text]


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, value) of an assignment, also of `a, b = x, y` and of `a, b = call()`."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple):
        for place, one in enumerate(target.elts):
            yield from _assigned(one, _part(value, place))


def _part(value: ast.expr, place: int) -> ast.expr:
    """Return what stands at a place of a tuple; of anything else, an expression that says so."""
    if isinstance(value, ast.Tuple):
        return value.elts[min(place, len(value.elts) - 1)]
    return ast.Subscript(value, ast.Constant(place))


def _texts(
    expression: ast.expr, values: Mapping[str, list[ast.expr]], functions: Mapping[str, list[ast.expr]], depth: int
) -> Iterator[str]:
    """Yield the texts an expression may become, "" left out; nothing where the source does not tell."""
    if depth == 0:
        return
    inner: list[ast.expr] = []
    if isinstance(expression, (ast.Constant, ast.JoinedStr)):
        yield template(expression)
    elif isinstance(expression, ast.IfExp):
        inner = [expression.body, expression.orelse]
    elif isinstance(expression, ast.BoolOp):
        inner = expression.values
    elif isinstance(expression, ast.Name):
        inner = values.get(expression.id, [])
    elif (
        isinstance(expression, ast.Subscript)
        and isinstance(expression.value, ast.Call)
        and isinstance(expression.slice, ast.Constant)
    ):
        called, place = expression.value.func, expression.slice.value
        returned = functions.get(called.id, []) if isinstance(called, ast.Name) else []
        inner = [_part(one, place) for one in returned if isinstance(one, ast.Tuple) and isinstance(place, int)]
    elif isinstance(expression, ast.Call) and isinstance(expression.func, ast.Name):
        name = expression.func.id
        if name in ("on", "as_root"):
            where = "as root on the node" if name == "as_root" else "on the node"
            for argument in expression.args[1:]:
                for text in _texts(argument, values, functions, depth - 1):
                    yield f"{where}: {text}"
            return
        inner = functions.get(name, [])
    for one in inner:
        yield from _texts(one, values, functions, depth - 1)


def template(text: ast.expr) -> str:
    """Return a text of the source with {…} for what varies; "" for what is no text."""
    if isinstance(text, ast.Constant):
        return text.value if isinstance(text.value, str) else ""
    if not isinstance(text, ast.JoinedStr):
        return ""
    parts = []
    for part in text.values:
        if isinstance(part, ast.Constant):
            parts.append(str(part.value))
        elif isinstance(part, ast.FormattedValue):
            parts.append("{" + _name_of(part.value) + "}")
    return "".join(parts)


def _name_of(value: ast.expr) -> str:
    """Return a word for what varies in a text: the name of the variable or attribute that is put there."""
    if isinstance(value, ast.Call) and value.args:
        called = value.func.attr if isinstance(value.func, ast.Attribute) else ""
        return _name_of(value.args[0]) if called in ("quote", "join") else _name_of(value.func)
    if isinstance(value, ast.Attribute):
        return value.attr
    return value.id.strip("_") if isinstance(value, ast.Name) else "…"
