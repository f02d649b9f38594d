"""How far GPUs and RDMA cards are from each other, from `nvidia-smi topo -m`; only asked where cluster.yaml states GPUs."""

from __future__ import annotations

from netcheck.facts.gpus import smi_text
from netcheck.facts.question import Question, Reply
from netcheck.tools import nvidia_smi_topo
from r4090c.model import Cluster, Node, TopologyMatrix

NAME = "gpu_topology"


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`. 20 s: as for facts.gpus."""
    return Question(command=("nvidia-smi", "topo", "-m") if node.gpus else None, timeout_s=20)


def parse(reply: Reply) -> TopologyMatrix:
    """Return the matrix. Raises ParseError when it is cut or flattened, with nvidia-smi's words where it refuses."""
    return nvidia_smi_topo.parse(smi_text(reply))
