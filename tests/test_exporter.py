"""`r4090c exporter`: names and values by Prometheus' own parser, the dashboard and the alerts against what is exported."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from launch.live import Heard, Snapshot, snapshot
from r4090c.cli.exporter import COUNTERS, GAUGES, Collector, address_of, metrics_of
from r4090c.errors import UsageError
from tests.cli import run
from tests.launch.live_samples import AT_S, HOSTILE, NOW_S, RUN, cluster_of_three, heard, metrics, state

GRAFANA = Path(__file__).parents[1] / "docs" / "grafana"
DASHBOARD = json.loads((GRAFANA / "r4090c.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((GRAFANA / "alerts.yml").read_text(encoding="utf-8"))
PREFIXED = re.compile(r"\br4090c_[a-z0-9_]+")
UNITS = ("_ratio", "_bytes", "_watts", "_celsius", "_hertz", "_seconds", "_per_second", "_info", "_up", "_load1", "_cpus")


class Still:
    """A watch that knows one snapshot."""

    def __init__(self, view: Snapshot) -> None:
        self.view = view

    def snapshot(self) -> Snapshot:
        return self.view


def view_of(nodes: list[Heard], later_s: float = 0.0) -> Snapshot:
    return snapshot("lab", nodes, 2.0, now_s=AT_S + later_s, time_s=NOW_S + later_s)


def scrape(view: Snapshot) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return (name, labels) -> value, as Prometheus reads the page."""
    registry = CollectorRegistry()
    registry.register(Collector(Still(view)))
    text = generate_latest(registry).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def value(found: dict[Any, float], name: str, /, **labels: str) -> float:
    """Return the one series of that name that has these labels."""
    (one,) = [got for (title, told), got in found.items() if title == f"r4090c_{name}" and set(labels.items()) <= set(told)]
    return one


def names(found: dict[Any, float]) -> set[str]:
    return {name for name, _ in found}


def test_what_a_scrape_says() -> None:
    found = scrape(view_of(cluster_of_three()))
    assert value(found, "node_up", node="node01") == 1 and value(found, "node_up", node="node03") == 0
    assert value(found, "node_cpu_utilization_ratio", node="node01") == pytest.approx(0.25)
    assert value(found, "gpu_utilization_ratio", node="node01", gpu="0") == 0.97
    assert value(found, "gpu_memory_used_bytes", node="node01", gpu="1") == 20_480 << 20
    assert value(found, "gpu_sm_clock_hertz", node="node01", gpu="1") == 2.52e9
    assert value(found, "gpu_lease_info", node="node01", gpu="1", run=RUN, user=HOSTILE) == 1
    assert value(found, "gpu_throttled", node="node01", gpu="0", reason="sw_power_cap") == 1
    assert value(found, "gpu_throttled", node="node01", gpu="0", reason="hw_slowdown") == 0
    assert value(found, "network_receive_bytes_total", node="node01", iface="eth0") == 250e6
    assert value(found, "rdma_receive_bytes_total", node="node01", port="mlx5_0:1") == 2e9
    assert value(found, "rdma_errors_total", node="node01", counter="symbol_error") == 2
    assert value(found, "network_info", node="node01", iface="eth0", data="true") == 1
    assert value(found, "network_info", node="node01", iface="lo", data="false") == 1
    assert value(found, "run_step", run=RUN) == 42 and value(found, "run_steps", run=RUN) == 200
    assert value(found, "run_tokens_per_second", run=RUN) == 12_345.6
    assert value(found, "run_ranks", run=RUN, phase="train") == 4
    assert value(found, "rank_last_beat_timestamp_seconds", run=RUN, rank="3", node="node02") == NOW_S - 14
    assert value(found, "filesystem_up", node="node02", path=f"/x/{HOSTILE}") == 0
    assert value(found, "gpu_info", node="node02", gpu="1", name="NVIDIA GeForce RTX 4090") == 1


def test_what_is_not_known_has_no_series() -> None:
    first, second, third = cluster_of_three()
    found = scrape(view_of([first, second, third]))
    assert not [key for key in found if ("node", "node03") in key[1] and key[0] != "r4090c_node_up"]
    with pytest.raises(ValueError, match="not enough values"):
        value(found, "gpu_processes", node="node02", gpu="1")
    hung = heard("node02", gpus={"error": "nvidia-smi has not answered for 12 s"}, apps={"error": "x"})
    found = scrape(view_of([hung]))
    assert value(found, "gpu_query_up", node="node02") == 0
    assert not [name for name in names(found) if name.startswith("r4090c_gpu_") and name != "r4090c_gpu_query_up"]
    assert "r4090c_gpu_query_up" not in names(scrape(view_of([heard("node01")]))), "a node that should have none"
    lost = "Unable to determine the device handle for GPU0000:42:00.0: GPU is lost.  Reboot the system to recover"
    assert second.last is not None
    text = second.last.raw["gpus"]["text"]
    found = scrape(view_of([heard("node02", gpus={**second.last.raw["gpus"], "text": text + lost + "\n"}, apps={"error": "x"})]))
    assert value(found, "gpu_faults", node="node02", pci="0000:42:00.0") == 1


def test_stale_nodes_and_ended_runs_disappear() -> None:
    found = scrape(view_of(cluster_of_three(), later_s=11))
    assert names(found) == {"r4090c_build_info", "r4090c_node_up"} and value(found, "node_up", node="node01") == 0
    told = {**state(RUN, "node01", 0, {0: ("done", 200, 5.0)}), "state": "ended", "alive": False, "outcome": "done"}
    found = scrape(view_of([heard("node01", runs=[told])]))
    assert value(found, "run_info", run=RUN, state="done") == 1
    assert not [name for name in names(found) if name.startswith(("r4090c_run_s", "r4090c_rank"))]


def everything() -> Snapshot:
    """Return a snapshot in which every metric has a series: a run of images beside the one of tokens."""
    lines = [{key: one for key, one in line.items() if key != "tokens_per_s"} for line in metrics(9, images_per_s=5.0)]
    images = state("resnet-1", "node04", 0, {0: ("train", 9, 0.1)}, metrics={"lines": lines})
    return view_of([*cluster_of_three(), heard("node04", runs=[images])])


def test_every_name_follows_the_conventions_and_can_appear() -> None:
    found = names(scrape(everything()))
    assert found == {f"r4090c_{name}" for name in GAUGES} | {f"r4090c_{name}_total" for name in COUNTERS}
    for metric in metrics_of(everything()):
        assert isinstance(metric, Metric) and metric.documentation.endswith(".")
        assert metric.type == ("counter" if metric.name.removeprefix("r4090c_") in COUNTERS else "gauge")
    plain = {"node_up", "gpu_throttled", "gpu_processes", "gpu_faults", "run_attempt", "run_step", "run_steps", "run_loss"}
    plain |= {"run_nodes_missing", "run_ranks", "rank_step"}
    assert {name for name in GAUGES if not name.endswith(UNITS)} == plain - {"node_up"}


# ------------------------------------------------------------------------------------------ dashboard, alerts, documentation


def expressions() -> dict[str, str]:
    """Return where -> PromQL of every panel, variable and alert."""
    found = {}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            found[f"${variable['name']}"] = variable["query"]["query"]
    for group in ALERTS["groups"]:
        found.update({rule["alert"]: rule["expr"] for rule in group["rules"]})
    return found


@pytest.mark.parametrize("where", expressions())
def test_every_expression_uses_what_is_exported(where: str) -> None:
    text = expressions()[where]
    labels = {name: {*told} for name, (_, told) in GAUGES.items()}
    labels |= {f"{name}_total": {*told} for name, (_, told) in COUNTERS.items()}
    used = PREFIXED.findall(text)
    assert (used and {name.removeprefix("r4090c_") for name in used} <= {*labels}) or text.startswith("up{")
    for name, inside in re.findall(r"\br4090c_([a-z0-9_]+)\{([^}]*)\}", text):
        assert set(re.findall(r"(\w+)\s*[=!]~?\s*\"", inside)) <= labels[name], f"{where}: {name} has {labels[name]}"


def test_the_dashboard_is_whole() -> None:
    panels = DASHBOARD["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids) and DASHBOARD["uid"] == "r4090c"
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, f"{panel['title']} lies over another panel"
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
            assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
    assert [one["name"] for one in DASHBOARD["templating"]["list"]] == ["datasource", "node", "run"]


def test_the_documentation_explains_every_metric_and_alert() -> None:
    text = (GRAFANA.parent / "monitoring.md").read_text(encoding="utf-8")
    for name in [*GAUGES, *(f"{name}_total" for name in COUNTERS)]:
        assert f"`r4090c_{name}`" in text, name
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["summary"] and rule["labels"]["severity"] in ("page", "warn")
    known = {f"r4090c_{name}" for name in GAUGES} | {f"r4090c_{name}_total" for name in COUNTERS}
    assert {name for name in PREFIXED.findall(text) if not name.endswith("_")} <= known


# ------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:9407", ("127.0.0.1", 9407)), ("[::1]:0", ("::1", 0)), ("localhost:80", ("localhost", 80))],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert address_of(text) == address


@pytest.mark.parametrize("text", ["9407", ":9407", "::1:9407", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000", "[]:1", ""])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError):
        address_of(text)


def test_a_port_that_is_taken_is_exit_code_2(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    nodes = "nodes: [{name: node01, address: 127.0.0.1, gpus: 0}]"
    file.write_text(f"name: gone\n{nodes}\nssh: {{user: x, port: 1}}\npaths: {{shared: /x, python: /y}}\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, errors = run("--cluster", str(file), "exporter", "--listen", f"127.0.0.1:{port}", state=tmp_path)
    assert code == 2 and f"port {port} is taken" in errors, errors
    code, _, errors = run("--cluster", str(file), "exporter", "--listen", "203.0.113.7:1", state=tmp_path)
    assert code == 2 and "everybody who reaches it" in errors and "cannot be listened on" in errors, errors


def test_an_odd_unit_of_a_run_is_no_new_name() -> None:
    view = everything()
    odd = replace(view.runs[0], unit="images")
    assert metrics_of(replace(view, runs=(odd,)))
