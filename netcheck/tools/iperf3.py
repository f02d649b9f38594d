"""iperf3 -J: what was sent, what arrived, and how many segments were sent twice.

Judge `received`, never `sent`: the sender's figure counts what still lies in its buffers. An error iperf3 reports is a value
(`error`, without figures where nothing ran); ParseError is for what is not iperf3's output or was cut short.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from netcheck.tools._reading import document, lines_of, number, whole
from r4090c.errors import ParseError

TOOL = "iperf3"
COMMAND = "iperf3 -J -c ADDRESS"

PLAIN_ERROR = re.compile(r"iperf3: (error|interrupt) - (\S.{0,300})")


@dataclass(frozen=True, slots=True)
class Iperf3:
    """One test as its client tells it; None = not told (nothing ran, or UDP has no such figure).

    `retransmits` of the sender, None where its system does not count them. `seconds`: how long the sender sent. `reverse`: the
    server sent. `lost_pct`: of UDP.
    """

    sent_gbit_s: float | None
    received_gbit_s: float | None
    retransmits: int | None
    streams: int | None
    seconds: float | None
    error: str | None
    protocol: str | None = None
    reverse: bool = False
    lost_pct: float | None = None
    version: str | None = None
    cpu_sender_pct: float | None = None
    cpu_receiver_pct: float | None = None


def parse(text: str) -> Iperf3:
    """Return the test. Raises ParseError for anything but iperf3's JSON, its event stream, or its plain error line."""
    start = text.find("{")
    if start < 0:
        said = [line.strip() for line in lines_of(text) if line.strip()]
        plain = next((match.group(2).strip() for line in said if (match := PLAIN_ERROR.match(line))), None)
        if plain is not None:
            return Iperf3(None, None, None, None, None, plain)
        raise ParseError(f"no JSON of iperf3 (run it with -J): {said[0][:120]!r}" if said else "iperf3: no output")
    whole_document = _events(text[start:]) if re.match(r'\{\s*"event"\s*:', text[start:]) else _document(text[start:])
    if not isinstance(whole_document, dict) or not ({"start", "end", "intervals", "error"} & whole_document.keys()):
        raise ParseError("JSON, but not of iperf3 -J")
    return _test_of(whole_document)


def _document(text: str) -> Any:
    """Return the JSON document `text` begins with: a plain error line may follow it."""
    return document(text[: text.rstrip().rfind("}") + 1] or text)


def _events(text: str) -> dict[str, Any]:
    """Return --json-stream's lines as the document -J prints."""
    found: dict[str, Any] = {}
    for line in lines_of(text):
        if line.strip().startswith("{"):
            event = document(line)
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                found[event["event"]] = event.get("data")
    return found


def _test_of(whole_document: Mapping[str, Any]) -> Iperf3:
    start, end = _mapping(whole_document, "start"), _mapping(whole_document, "end")
    setup, cpu = _mapping(start, "test_start"), _mapping(end, "cpu_utilization_percent")
    total = _mapping(end, "sum")  # of UDP
    sent, received = _mapping(end, "sum_sent") or total, _mapping(end, "sum_received") or total
    error = whole_document.get("error")
    streams = end.get("streams")
    version = start.get("version")
    protocol = setup.get("protocol")
    seconds = number(sent.get("seconds"))
    if error is None and not (sent and received):
        raise ParseError("iperf3: no sums, the test did not come to its end")
    return Iperf3(
        sent_gbit_s=_gbit_s(sent),
        received_gbit_s=_gbit_s(received),
        retransmits=whole(sent.get("retransmits")),
        streams=whole(setup.get("num_streams")) or (len(streams) if isinstance(streams, list) and streams else None),
        seconds=seconds,
        error=None if error is None else (error[:300] if isinstance(error, str) and error else "an error without words"),
        protocol=protocol[:16] if isinstance(protocol, str) else None,
        reverse=setup.get("reverse") in (1, True),
        lost_pct=number(received.get("lost_percent")) if received.get("lost_percent") is not None else None,
        version=version[:64] if isinstance(version, str) else None,
        cpu_sender_pct=number(cpu.get("host_total")),
        cpu_receiver_pct=number(cpu.get("remote_total")),
    )


def _gbit_s(total: Mapping[str, Any]) -> float | None:
    bits = number(total.get("bits_per_second"))
    return None if bits is None or bits < 0 else bits / 1e9


def _mapping(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = value.get(key)
    return part if isinstance(part, dict) else {}
