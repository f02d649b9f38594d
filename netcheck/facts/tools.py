"""Which programs the measurements can use on a node, and where: looked up, not started.

PATH first, then where people build and vendors install. Of nccl-tests also whether it was built with MPI, which decides how it is
started on several nodes: its file then names libmpi.so (`readelf -d` shows the same, but is not everywhere).
"""

from __future__ import annotations

from collections.abc import Mapping
from posixpath import dirname

from netcheck.facts.question import Question, Reply, as_list, as_mapping, as_str
from r4090c.errors import ParseError
from r4090c.model import Cluster, Node, Tool

NAME = "tools"
NCCL_TESTS = ("all_reduce_perf", "all_gather_perf", "reduce_scatter_perf")
NCCL_TESTS_FOLDERS = (
    "/opt/nccl-tests/build",
    "/usr/local/nccl-tests/build",
    "~/nccl-tests/build",
    "/usr/lib/nccl-tests",
    "/usr/libexec/nccl-tests",
)
"""`make` of nccl-tests leaves its programs in build/, and has no install target."""
MPI_FOLDERS = ("/usr/lib/x86_64-linux-gnu/openmpi/bin", "/usr/lib64/openmpi/bin", "/opt/openmpi/bin", "/usr/mpi/gcc/openmpi*/bin")
"""Debian, Fedora, by hand, MLNX_OFED."""
CUDA_FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/extras/demo_suite")
MPI_LIBRARY = "libmpi.so"
OTHERS = (
    "iperf3",
    "ib_write_bw",
    "ib_send_lat",
    "nvidia-smi",
    "nvbandwidth",
    "numactl",
    "chronyc",
    "ethtool",
    "lspci",
    "dcb",
    "mlnx_qos",
)


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`. Some of the folders may be on shared storage: 5 s (est.)."""
    folders = (*NCCL_TESTS_FOLDERS, f"{node.paths.shared}/nccl-tests/build")
    tests = NCCL_TESTS if node.gpus else ()
    wanted = {name: [[f"{folder}/{name}" for folder in folders], MPI_LIBRARY] for name in tests}
    wanted["mpirun"] = [[f"{folder}/mpirun" for folder in MPI_FOLDERS], ""]
    wanted["torchrun"] = [[f"{dirname(node.paths.python)}/torchrun"], ""]
    wanted["nvcc"] = [[f"{folder}/nvcc" for folder in CUDA_FOLDERS], ""]
    for name in OTHERS:
        wanted[name] = [[], ""]
    return Question(natives={"tools": wanted}, timeout_s=5)


def parse(reply: Reply) -> Mapping[str, Tool]:
    """Return name -> Tool of the programs that are there. Raises ParseError when they could not be looked up."""
    return read_tools(reply)


def read_tools(reply: Reply) -> dict[str, Tool]:
    """Return what the native `tools` found, by the name asked for. Raises ParseError."""
    tools = {}
    for name, value in as_mapping(reply.native("tools"), "tools").items():
        found = as_list(value, name)
        if len(found) != 3 or not isinstance(found[2], (bool, type(None))):
            raise ParseError(f"{name}: expected [path, real path, whether it holds a text]")
        tools[name] = Tool(path=as_str(found[0], name), real=as_str(found[1], name), mpi=found[2])
    return tools
