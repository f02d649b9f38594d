"""What the checks over GPUs under load have in common: nodes that took no part, and the words about single GPUs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from netcheck.checks._collective import took_no_part
from netcheck.measure.gpu_load import LoadedGpu, NodeLoad
from r4090c.model import Cluster, Finding, Gpu, PythonFact, Status, Tool


def not_loaded(
    check_id: str,
    loads: Mapping[str, NodeLoad],
    gpus: Mapping[str, Sequence[Gpu] | None],
    pythons: Mapping[str, PythonFact | None],
    tools: Mapping[str, Mapping[str, Tool] | None],
    expected: str,
    cluster: Cluster,
) -> dict[str, Finding]:
    """Return node -> Finding of those that were not loaded, or whose load ended before anything was measured."""
    found = {}
    for name in gpus:
        node = cluster.node(name)
        if name not in loads:
            found[name] = took_no_part(check_id, node, gpus[name], pythons[name], tools[name], least=1)
        elif loads[name].error and not any(gpu.tflops is not None or gpu.loaded for gpu in loads[name].gpus):
            remedy = loads[name].next_command or "r4090c preflight --full --only gpu-load-errors"
            found[name] = Finding(check_id, name, Status.UNKNOWN, f"not measured: {loads[name].error}", expected, "", remedy)
    return found


def by_node(loads: Sequence[NodeLoad], gpus: Mapping[str, object]) -> dict[str, NodeLoad]:
    """Return the loads of the nodes that are judged."""
    return {load.node: load for load in loads if load.node in gpus}


def usable(load: NodeLoad) -> tuple[LoadedGpu, ...]:
    """Return the GPUs of which something was measured."""
    return tuple(gpu for gpu in load.gpus if gpu.tflops is not None or gpu.loaded or gpu.h2d_gbyte_s is not None)
