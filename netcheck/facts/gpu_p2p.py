"""Which pairs of GPUs the driver grants P2P, from `nvidia-smi topo -p2p r`; only asked where cluster.yaml states GPUs."""

from __future__ import annotations

from netcheck.facts.gpus import smi_text
from netcheck.facts.question import Question, Reply
from netcheck.tools import nvidia_smi_p2p
from r4090c.model import Cluster, Node, P2pMatrix

NAME = "gpu_p2p"


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`. 20 s: as for facts.gpus."""
    return Question(command=("nvidia-smi", "topo", "-p2p", "r") if node.gpus else None, timeout_s=20)


def parse(reply: Reply) -> P2pMatrix:
    """Return the matrix. Raises ParseError when there is none, with nvidia-smi's words where it refuses."""
    return nvidia_smi_p2p.parse(smi_text(reply))
