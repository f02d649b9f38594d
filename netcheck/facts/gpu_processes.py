"""The programs that hold GPU memory from `nvidia-smi --query-compute-apps`, and whose they are; only asked where GPUs are stated.

A graphical desktop is no compute program and not among them. A process of another container or behind hidepid has no owner here.
"""

from __future__ import annotations

from dataclasses import replace

from netcheck.facts.gpus import smi_text
from netcheck.facts.question import Question, Reply, as_int, as_list, as_mapping
from netcheck.tools import nvidia_smi_compute_apps
from r4090c.model import Cluster, GpuProcess, Node

NAME = "gpu_processes"


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`. 20 s: as for facts.gpus."""
    if not node.gpus:
        return Question()
    fields = ",".join(nvidia_smi_compute_apps.FIELDS)
    return Question(
        natives={"owners": None}, command=("nvidia-smi", f"--query-compute-apps={fields}", "--format=csv"), timeout_s=20
    )


def parse(reply: Reply) -> tuple[GpuProcess, ...]:
    """Return one entry a process and GPU; none when nothing runs. Raises ParseError."""
    processes = nvidia_smi_compute_apps.parse(smi_text(reply))
    owners = {
        as_int(pid, "pid"): as_int(uid, "uid")
        for uid, pids in as_mapping(reply.native("owners"), "owners").items()
        for pid in as_list(pids, f"processes of {uid}")
    }
    return tuple(replace(process, uid=owners.get(process.pid)) for process in processes)
