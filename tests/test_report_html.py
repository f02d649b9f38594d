"""The HTML report: one page that needs nothing else, in which nothing that a node said can act."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from netcheck.bundle import save_bundle
from netcheck.figures import Matrix
from netcheck.measure.figure import Figure
from netcheck.report import Outcome
from netcheck.report_drawing import SHORTFALL, best_of, heat_map, shade
from netcheck.report_html import SCRIPT, STYLE, page
from netcheck.report_text import printable
from r4090c.errors import Exit
from r4090c.model import Fact, Finding, Status
from tests.cli import run
from tests.reports import machine, outcome_of, pairs_of

CASE: dict[str, Any] = {
    "nodes": 4,
    "facts": {
        "node02": {"clock": {"offset_s": 6.0}, "limits": {"error": "rlimits: not in the answer"}},
        "node03": {"python": {"packages": {"torch": "2.5.1"}}},
    },
    "reach": {"node04": {"verdict": "timeout", "observed": "no answer in 5 s", "next_command": "ping node04"}},
}
NAMES = ("node01", "node02", "node03")
VOID = {"meta", "input", "br", "rect", "path"}


class Page(HTMLParser):
    """What a browser would see: elements, attributes and text. Fails on an element that is closed wrongly."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.words: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.comments = 0
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.setdefault(self.open[-1] if self.open else "", []).append(data)

    def handle_comment(self, data: str) -> None:
        self.comments += 1

    @property
    def text(self) -> str:
        return "".join(word for tag, words in self.words.items() if tag not in ("script", "style") for word in words)


def links(rate: float = 92.0) -> list[Figure]:
    return [
        Figure("tcp", f"{one}->{other}", "4 streams", rate if (one, other) != ("node01", "node03") else rate / 4, "Gbit/s")
        for pair in pairs_of(NAMES)
        for one, other in (pair, pair[::-1])
    ]


def outcome() -> Outcome:
    return outcome_of(CASE, links())


def assert_harmless(text: str) -> Page:
    """Nothing of the page acts but its own script, nothing is loaded, and the policy says so."""
    seen = Page(text)
    assert (seen.tags["script"], seen.tags["style"], seen.comments) == (1, 1, 0)
    assert "".join(seen.words["script"]) == SCRIPT and "".join(seen.words["style"]) == STYLE
    assert not {"iframe", "object", "embed", "base", "link", "img", "form", "a:href"} & {*seen.tags}
    for tag, name, value in seen.attributes:
        assert not name.startswith("on") and name not in ("style", "src", "srcset", "action", "formaction"), (tag, name)
        if name in ("href", "xlink:href"):
            assert re.fullmatch(r"#[a-z]+", value)
        if tag == "meta" and name == "http-equiv":
            assert value == "Content-Security-Policy"
    return seen


# --------------------------------------------------------------------------- what is on it


def test_everything_is_on_the_page() -> None:
    shown = outcome()
    seen = assert_harmless(page(shown))
    for finding in shown.findings:
        assert finding.observed in seen.text and finding.subject in seen.text and finding.check in seen.text
        if finding.status in (Status.FAIL, Status.WARN):
            assert finding.remedy in seen.text and finding.why in seen.text and finding.expected in seen.text
    assert {value for _, name, value in seen.attributes if name == "data-show"} == {"all", "fail", "unknown"}
    for word in ("not fit", "mlx5_0:1", "GeForce RTX 4090", "ubuntu 24.04", "torch 2.5.1", "no answer in 5 s", "23.0", "NUMA 0"):
        assert word in seen.text, word
    assert ("td", "class", "odd") in seen.attributes, "node03 has another torch than most"


def test_a_healthy_cluster_has_nothing_to_mend() -> None:
    seen = assert_harmless(page(outcome_of({"nodes": 2})))
    assert "Nothing: " in seen.text and "nothing to mend" in seen.text
    assert "data-show" not in {name for _, name, _ in seen.attributes}
    assert "Bandwidth" not in seen.text and "Since the last" not in seen.text


def test_the_policy_lets_only_its_own_style_and_script_work() -> None:
    (policy,) = [value for tag, name, value in Page(page(outcome())).attributes if tag == "meta" and "default-src" in value]
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    for text in (STYLE, SCRIPT):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    assert "</" not in SCRIPT and "</" not in STYLE and "url(" not in STYLE and "@import" not in STYLE


def test_remedies_are_commands_to_copy_or_words() -> None:
    shown = replace(
        outcome(),
        findings=[
            Finding("mount", "node01", Status.FAIL, "gone", "there", "needed", "ssh node01 'mount /mnt'"),
            Finding("gpu-faults", "node02", Status.FAIL, "lost", "answers", "needed", "reseat the card in slot 3"),
        ],
    )
    seen = assert_harmless(page(shown))
    assert seen.words["code"] == ["ssh node01 'mount /mnt'"]
    assert "→ reseat the card in slot 3" in seen.text
    assert [name for tag, name, _ in seen.attributes if tag == "button" and name == "data-copy"] == ["data-copy"]


# --------------------------------------------------------------------------- hostile nodes

HOSTILE = [
    "<script>alert(1)</script>",
    "</title></style></script><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)" x="',
    "' autofocus onfocus='alert(1)",
    "<!-- ",
    "]]><svg/onload=alert(1)>",
    "javascript:alert(1)",
    "&lt;b&gt; &amp; &#60;i&#62;",
    "\u202egnp.exe",
    "a\x00b\x1b[31mred\x07",
    "{{7*7}} ${7*7} `id`",
]


def planted(text: str) -> Outcome:
    """Return an outcome with `text` in everything that a node, a tool or a forged bundle may fill."""
    base = outcome()
    facts = {
        name: replace(
            own,
            os=Fact(replace(own.os.value, distribution=text, kernel=text)) if own.os.value else Fact(error=text),
            gpus=Fact(tuple(replace(gpu, name=text, driver=text) for gpu in own.gpus.value or ())),
            rdma=Fact(tuple(replace(port, hca=text, netdev=text, state=text) for port in own.rdma.value or ())),
            net=Fact(replace(own.net.value, ifaces=tuple(replace(one, name=text) for one in own.net.value.ifaces)))
            if own.net.value
            else Fact(error=text),
            python=Fact(error=text),
            cpus=Fact(absent=text),
        )
        for name, own in base.facts.items()
    }
    findings = [Finding(text, f"node01/{text}", status, text, text, text, f"ssh {text}") for status in Status]
    figures = [*base.figures, Figure(text, f"node01->{text}", text, 1.0, text), Figure(text, text, text, 2.0, text)]
    reach = {name: {**how, "observed": text} for name, how in base.raw.reach.items()}
    nodes = tuple(replace(node, data_address=text) for node in base.cluster.nodes)
    cluster = replace(base.cluster, name=text, nodes=nodes)
    raw = replace(base.raw, reach=reach, started_at=text)  # type: ignore[arg-type]
    return replace(base, cluster=cluster, raw=raw, facts=facts, findings=findings, figures=figures, level=text)


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_node_says_cannot_act(text: str) -> None:
    seen = assert_harmless(page(planted(text)))
    assert printable(text) in seen.text
    assert "alert(1)" not in "".join(seen.words["script"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(st.sampled_from("<>\"'&/= \n\x00\u202eabsx") | st.characters(), max_size=24))
def test_no_text_at_all_can_act(text: str) -> None:
    seen = assert_harmless(page(planted(text)))
    known = [Page(page(one)) for one in (planted("x"), outcome())]
    assert {*seen.tags} <= {tag for one in known for tag in one.tags}
    assert {(tag, name) for tag, name, _ in seen.attributes} <= {(tag, name) for one in known for tag, name, _ in one.attributes}


def test_what_cannot_be_seen_is_made_visible() -> None:
    assert printable("a\u202eb\x1bc\td\n") == "a\ufffdb\ufffdc\td\n"
    assert printable("größe 東京 ✓") == "größe 東京 ✓"


# --------------------------------------------------------------------------- the heat map


def matrix(rates: dict[tuple[str, str], float], higher: bool = True) -> Matrix:
    return Matrix("tcp", "4 streams", "Gbit/s", ("a", "b", "c"), rates, higher)


def test_every_link_has_its_cell_with_its_number() -> None:
    rates = {("a", "b"): 9.41, ("b", "a"): 9.39, ("b", "c"): 2.5}
    drawing = heat_map(matrix(rates))
    Page(drawing)
    for (sender, receiver), value in rates.items():
        assert re.search(rf'<title>{sender}-&gt;{receiver}: {value:.2f} Gbit/s</title><rect class="s\d"', drawing)
    assert drawing.count('class="missing"') == 3
    assert "a-&gt;a" not in drawing


def test_darker_is_worse_whichever_way_is_better() -> None:
    for higher in (True, False):
        values = [100.0, 96.0, 91.0, 86.0, 81.0, 71.0, 56.0, 10.0]
        tones = [shade(value if higher else 1e4 / value, 100.0, higher) for value in values]
        assert tones == sorted(tones) and tones[0] == 0 and tones[-1] == len(SHORTFALL)


def test_one_outlier_upwards_makes_nobody_look_bad() -> None:
    names = [f"n{i}" for i in range(6)]
    rates = {(a, b): 10.0 for a in names for b in names if a != b} | {("n0", "n1"): 40.0}
    assert best_of(Matrix("tcp", "", "Gbit/s", tuple(names), rates)) == 10.0


def test_a_map_of_nothing_and_of_zero_is_no_fault() -> None:
    assert shade(0.0, 0.0, True) == 0
    Page(heat_map(matrix({("a", "b"): 0.0})))
    Page(heat_map(matrix({})))


# --------------------------------------------------------------------------- the command


def test_the_command_writes_it_after_the_report(tmp_path: Path) -> None:
    cluster, raw = machine(tmp_path, "n1", "n2", rate=lambda sender, receiver: 9.4)
    save_bundle(tmp_path / "b.tar.gz", cluster, raw)
    code, output, errors = run("preflight", "--from", "b.tar.gz", "--only", "time", "--html", "r.html", state=tmp_path)
    assert (code, errors) == (Exit.OK, "written: r.html\n")
    assert output.startswith("local: fit")
    seen = assert_harmless((tmp_path / "r.html").read_text())
    assert "clock-skew" in seen.text and "9.40" in seen.text
    assert [entry.name for entry in tmp_path.glob(".*.tmp")] == []


def test_no_token_that_a_node_printed_is_on_it(tmp_path: Path) -> None:
    cluster, raw = machine(tmp_path, "n1")
    reach: Any = {**raw.reach["n1"], "noise": "export HF_TOKEN=hf_printedByTheShell\n"}
    save_bundle(tmp_path / "b.tar.gz", cluster, replace(raw, reach={"n1": reach}))
    words = ("preflight", "--from", "b.tar.gz", "--only", "remote-shell", "--html", "r.html", "--junit", "r.xml")
    run(*words, state=tmp_path)
    for file in ("r.html", "r.xml"):
        text = (tmp_path / file).read_text()
        assert "remote-shell" in text and "hf_printedByTheShell" not in text
