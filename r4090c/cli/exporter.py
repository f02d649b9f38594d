"""`r4090c exporter`: what `r4090c top` shows, for Prometheus.

Everything is built anew at each scrape from what is known then: a node that is silent, a run that has ended, a GPU that is not
answered for have no series, rather than an old value.
"""

from __future__ import annotations

import errno
import ipaddress
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from r4090c import __version__
from r4090c.cli.common import choose_nodes, cluster_option, load, nodes_option, styled
from r4090c.errors import Exit, UsageError

if TYPE_CHECKING:
    from prometheus_client import Metric

    from launch.live import GpuView, LinkView, NodeView, RunView, Snapshot

DEFAULT = "127.0.0.1:9407"
GOING_ON = ("starting", "running", "ending")


@click.command("exporter")
@click.option("--listen", default=DEFAULT, show_default=True, metavar="HOST:PORT", help="Where Prometheus scrapes.")
@click.option("--interval", type=click.FloatRange(0.5, 60), default=5.0, show_default=True, help="Seconds between two looks.")
@cluster_option
@nodes_option
def command(listen: str, interval: float, cluster_file: str | None, nodes: str | None) -> int:
    """Serve what the nodes and the runs do now at http://HOST:PORT/metrics, until Ctrl-C or SIGTERM.

    There is no password: keep to loopback, or to an address that only Prometheus reaches. docs/monitoring.md explains each
    metric; docs/grafana/ has a dashboard and alert rules.

    \b
    Examples:
      r4090c exporter
      r4090c exporter --listen [::1]:9500 --interval 10
    """
    from prometheus_client import CollectorRegistry, start_http_server

    from launch.watch import Watch
    from r4090c.remote import Fleet

    host, port = address_of(listen)
    if not _is_loopback(host):
        told = f"--listen {listen}: everybody who reaches it reads the names of nodes and runs; there is no password"
        click.echo(f"{styled('warning:', fg='yellow')} {told}", err=True)
    cluster = load(cluster_file)
    chosen = choose_nodes(cluster, nodes)
    with Fleet(chosen) as fleet, Watch(fleet, cluster, chosen, interval) as watch:
        registry = CollectorRegistry()
        registry.register(Collector(watch))
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            raise _cannot_listen(listen, port, error) from error
        try:
            name = f"[{host}]" if ":" in host else host
            click.echo(f"http://{name}:{server.server_port}/metrics", err=True)
            threading.Event().wait()
        except KeyboardInterrupt:
            pass  # SIGTERM as well: the ordinary end of a service
        finally:
            server.shutdown()
            server.server_close()
            thread.join(5)
    return Exit.OK


def address_of(listen: str) -> tuple[str, int]:
    """Return (host, port) of "127.0.0.1:9407" or "[::1]:9407". Raises UsageError."""
    host, colon, port = listen.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    if not colon or not bare or (":" in bare and not bracketed) or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--listen {listen}", "not HOST:PORT", "an address and a port", f"r4090c exporter --listen {DEFAULT}")
    return bare, int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _cannot_listen(listen: str, port: int, error: OSError) -> UsageError:
    if error.errno == errno.EADDRINUSE:
        observed = f"port {port} is taken by another process"
        return UsageError(f"--listen {listen}", observed, "a free port", f"ss -ltnp 'sport = :{port}'")
    return UsageError(
        f"--listen {listen}", f"cannot be listened on: {error.strerror or error}", "an address of this machine", "ip -br address"
    )


class Collector:
    """What prometheus_client asks at each scrape."""

    def __init__(self, watch: Any) -> None:
        self._watch = watch

    def collect(self) -> Iterable[Metric]:
        """Return all metrics as they are now."""
        return metrics_of(self._watch.snapshot())


# ----------------------------------------------------------------------------- a snapshot as metrics

NODE, RUN, RANK = ("node",), ("run",), ("run", "rank", "node")
GPU, IFACE, PORT, DISK = ("node", "gpu", "uuid"), ("node", "iface"), ("node", "port"), ("node", "path")

GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "build_info": ("The version of r4090c, always 1.", ("version",)),
    "node_up": ("1 while the node gives samples over SSH, else 0.", NODE),
    "node_cpu_utilization_ratio": ("Share of CPU time in use between the last two samples, 0 to 1.", NODE),
    "node_load1": ("Load average over one minute.", NODE),
    "node_cpus": ("CPUs the kernel has online.", NODE),
    "node_memory_total_bytes": ("Memory of the node.", NODE),
    "node_memory_available_bytes": ("Memory that programs can still get (MemAvailable).", NODE),
    "filesystem_up": ("1 while the file system answers, 0 while it hangs or fails.", DISK),
    "filesystem_size_bytes": ("Size of the file system.", DISK),
    "filesystem_free_bytes": ("What an ordinary user can still write.", DISK),
    "gpu_query_up": ("1 while nvidia-smi answers on a node that should have GPUs, else 0.", NODE),
    "gpu_info": ("What the GPU is, always 1.", (*GPU, "name", "pci")),
    "gpu_utilization_ratio": ("Share of time in which a kernel ran, 0 to 1 (utilization.gpu).", GPU),
    "gpu_memory_used_bytes": ("GPU memory in use.", GPU),
    "gpu_memory_total_bytes": ("GPU memory.", GPU),
    "gpu_power_watts": ("Power drawn.", GPU),
    "gpu_power_limit_watts": ("Power limit in force.", GPU),
    "gpu_temperature_celsius": ("Temperature of the GPU.", GPU),
    "gpu_sm_clock_hertz": ("Clock of the SMs.", GPU),
    "gpu_throttled": ("1 while this reason slows the GPU down, else 0.", (*GPU, "reason")),
    "gpu_processes": ("Compute processes that hold memory of the GPU.", GPU),
    "gpu_lease_info": ("The run that holds the GPU, of any account, always 1.", (*GPU, "user", "run")),
    "gpu_faults": ("Complaints of nvidia-smi about the GPU (ERR!, GPU is lost).", (*GPU, "pci")),
    "network_info": ("Which interface carries the training traffic (data), always 1.", (*IFACE, "data")),
    "network_rate_bytes_per_second": ("What the link can carry one way.", IFACE),
    "rdma_info": ("Which RDMA port carries the training traffic (data), always 1.", (*PORT, "data")),
    "rdma_rate_bytes_per_second": ("What the port can carry one way.", PORT),
    "run_info": ("What the run is and how it stands, always 1.", (*RUN, "recipe", "state")),
    "run_attempt": ("Number of the attempt, from 1; it grows with each restart.", RUN),
    "run_step": ("Last optimizer step.", RUN),
    "run_steps": ("Optimizer steps the run is to take.", RUN),
    "run_loss": ("Loss of the last step.", RUN),
    "run_tokens_per_second": ("Tokens a second over all ranks, median of the last steps.", RUN),
    "run_images_per_second": ("Images a second over all ranks, median of the last steps.", RUN),
    "run_step_duration_seconds": ("Time of a step, median of the last steps.", RUN),
    "run_remaining_seconds": ("Estimated time to the last step.", RUN),
    "run_last_step_timestamp_seconds": ("Unix time of the last step, by the clock of the run's first node.", RUN),
    "run_nodes_missing": ("Nodes of the run that tell nothing.", RUN),
    "run_ranks": ("Ranks in this phase.", (*RUN, "phase")),
    "rank_step": ("Last step of the rank.", RANK),
    "rank_last_beat_timestamp_seconds": ("Unix time of the rank's last heartbeat, by its node's clock.", RANK),
}
"""Name without "r4090c_" -> what it says, and its labels."""
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "network_receive_bytes": ("Bytes received since boot.", IFACE),
    "network_transmit_bytes": ("Bytes sent since boot.", IFACE),
    "network_errors": ("Errors of the interface since boot (rx_errors, tx_errors).", (*IFACE, "counter")),
    "rdma_receive_bytes": ("Bytes received by RDMA (port_rcv_data × 4).", PORT),
    "rdma_transmit_bytes": ("Bytes sent by RDMA (port_xmit_data × 4).", PORT),
    "rdma_errors": ("Errors of the RDMA port that mean loss.", (*PORT, "counter")),
}
"""The same for what only grows; Prometheus shows the names with "_total"."""

Row = tuple[str, tuple[str, ...], float | int | bool | None]
"""Name, label values, value; None = not known, so there is no series."""


def metrics_of(view: Snapshot) -> list[Metric]:
    """Return the metrics of a snapshot, those without any series left out."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for name, labels, value in rows_of(view):
        if value is None:
            continue
        if name not in families:
            kind = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
            help_text, label_names = (COUNTERS if name in COUNTERS else GAUGES)[name]
            families[name] = kind(f"r4090c_{name}", help_text, labels=label_names)
        families[name].add_metric(labels, float(value))
    return list(families.values())


def rows_of(view: Snapshot) -> Iterator[Row]:
    """Yield every series of a snapshot."""
    yield "build_info", (__version__,), 1
    for node in view.nodes:
        yield "node_up", (node.name,), node.up
        if node.up:
            yield from _node_rows(node)
    for run in view.runs:
        yield from _run_rows(run)


def _node_rows(node: NodeView) -> Iterator[Row]:
    at = (node.name,)
    yield "node_cpu_utilization_ratio", at, node.cpu
    yield "node_load1", at, node.load1
    yield "node_cpus", at, node.cores
    yield "node_memory_total_bytes", at, node.memory_total_bytes
    yield "node_memory_available_bytes", at, node.memory_available_bytes
    for disk in node.disks:
        yield "filesystem_up", (*at, disk.path), disk.error is None
        yield "filesystem_size_bytes", (*at, disk.path), disk.size_bytes
        yield "filesystem_free_bytes", (*at, disk.path), disk.free_bytes
    if node.gpus is not None or node.gpus_error is not None:
        yield "gpu_query_up", at, node.gpus is not None
    for gpu in node.gpus or ():
        yield from _gpu_rows(node.name, gpu)
    for link in node.links:
        yield from _link_rows(node.name, link)


def _gpu_rows(node: str, gpu: GpuView) -> Iterator[Row]:
    from launch.live import THROTTLE

    at = (node, "" if gpu.index < 0 else str(gpu.index), gpu.uuid)
    yield "gpu_faults", (*at, gpu.pci), len(gpu.faults)
    if gpu.index < 0:  # the driver cannot open it: there is nothing else to tell
        return
    yield "gpu_info", (*at, gpu.name, gpu.pci), 1
    yield "gpu_utilization_ratio", at, gpu.utilization
    yield "gpu_memory_used_bytes", at, gpu.memory_used_bytes
    yield "gpu_memory_total_bytes", at, gpu.memory_total_bytes
    yield "gpu_power_watts", at, gpu.power_w
    yield "gpu_power_limit_watts", at, gpu.power_limit_w
    yield "gpu_temperature_celsius", at, gpu.temperature_c
    yield "gpu_sm_clock_hertz", at, gpu.sm_clock_hz
    yield "gpu_processes", at, None if gpu.processes is None else len(gpu.processes)
    if gpu.lease is not None:
        yield "gpu_lease_info", (*at, gpu.lease.user or "", gpu.lease.run_id or ""), 1
    if gpu.throttle is not None:
        for reason in dict.fromkeys([*(name for name, _ in THROTTLE.values()), *gpu.throttle]):
            yield "gpu_throttled", (*at, reason), reason in gpu.throttle


def _link_rows(node: str, link: LinkView) -> Iterator[Row]:
    at, kind = (node, link.name), "rdma" if link.kind == "rdma" else "network"
    yield f"{kind}_info", (*at, "true" if link.data else "false"), 1
    yield f"{kind}_rate_bytes_per_second", at, link.rate_bytes_per_s
    yield f"{kind}_receive_bytes", at, link.rx_bytes
    yield f"{kind}_transmit_bytes", at, link.tx_bytes
    for counter, total in link.errors.items():
        yield f"{kind}_errors", (*at, counter), total


def _run_rows(run: RunView) -> Iterator[Row]:
    at = (run.id,)
    yield "run_info", (*at, run.recipe or "", run.state), 1
    if run.state not in GOING_ON:
        return
    yield "run_attempt", at, run.attempt
    yield "run_step", at, run.step
    yield "run_steps", at, run.steps
    yield "run_loss", at, run.loss
    yield f"run_{run.unit}_per_second", at, run.rate_per_s
    yield "run_step_duration_seconds", at, run.step_time_s
    yield "run_remaining_seconds", at, run.left_s
    yield "run_last_step_timestamp_seconds", at, run.last_step_s
    yield "run_nodes_missing", at, len(run.missing)
    for phase, count in Counter(rank.phase for rank in run.ranks).items():
        yield "run_ranks", (*at, phase), count
    for rank in run.ranks:
        if rank.phase not in ("gone", "done"):
            where = (run.id, str(rank.rank), rank.node)
            yield "rank_step", where, rank.step
            yield "rank_last_beat_timestamp_seconds", where, rank.beat_s
