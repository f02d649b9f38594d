"""Whether DeepSpeed can build its own operators on the nodes.

Most recipes need none of them, so a missing compiler is a skip with what installs it; `expect: {compiler: true}` in cluster.yaml
demands it (optimizer offload to the CPU and DeepSpeed's fused optimizers are built at their first use).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from netcheck.checks._wording import as_root, listed, origin
from r4090c.model import Cluster, Finding, Node, PythonFact, Status, ToolchainFact

ID, GROUP, NEEDS, OPTIONAL = "compiler", "software", ("toolchain",), ("python",)
RULE = "nvcc (with GPUs; of torch's CUDA), ninja and c++ found; fail if compiler: {compiler} is true, else skip"
SOURCE = "deepspeed/ops/op_builder; torch.utils.cpp_extension"

PACKAGES = {"ninja": "ninja-build", "c++": "g++"}
"""Program -> the Debian and Ubuntu package that brings it."""
CUDA_RUNTIME = re.compile(r"nvidia-cuda-runtime(-cu\d{1,3})?")


def check(node: Node, tools: ToolchainFact, python: PythonFact | None, cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding: all there (pass), else skip or, where cluster.yaml demands it, fail."""
    wanted = ("nvcc", "ninja", "c++") if node.gpus else ("ninja", "c++")
    missing = [program for program in wanted if tools.programs.get(program) is None]
    cuda = torch_cuda(python)
    other = bool(node.gpus and cuda and tools.cuda and tools.cuda.split(".")[0] != cuda.split(".")[0])
    expected = f"{', '.join(wanted)}{origin(cluster, 'compiler')}"
    if not missing and not other:
        version = f", CUDA {tools.cuda}" if node.gpus and tools.cuda else ""
        yield Finding(ID, node.name, Status.PASS, f"{', '.join(wanted)} found{version}", expected)
        return
    observed = f"no {listed(missing)}" if missing else f"CUDA toolkit {tools.cuda}, torch is built for CUDA {cuda}"
    demanded = cluster.expect.compiler
    why = (
        "DeepSpeed builds CPU and fused optimizers at their first use, and refuses a toolkit of another CUDA version than torch's"
    )
    if not demanded:
        why = "needed only by recipes that build DeepSpeed's operators; compiler: true under expect in cluster.yaml demands it"
    packages = [PACKAGES[program] for program in missing if program in PACKAGES]
    if "nvcc" in missing or other:
        packages.append(_toolkit(cuda))
        why += "; the toolkit comes from NVIDIA's package repository"
    remedy = as_root(node, f"apt-get install -y {' '.join(packages)}")
    yield Finding(ID, node.name, Status.FAIL if demanded else Status.SKIP, observed, expected, why, remedy)


def torch_cuda(python: PythonFact | None) -> str | None:
    """Return the CUDA version torch is built for, from its label (+cu124) or the runtime wheel beside it; None = not told."""
    if python is None:
        return None
    label = re.search(r"\+cu(\d{2,3})(\d)$", python.packages.get("torch", ""))
    if label:
        return f"{label.group(1)}.{label.group(2)}"
    wheels = [version for name, version in sorted(python.packages.items()) if CUDA_RUNTIME.fullmatch(name)]
    return wheels[-1] if wheels else None


def _toolkit(cuda: str | None) -> str:
    """Return NVIDIA's package of a toolkit: cuda-toolkit-12-4, or the newest where torch does not tell its CUDA."""
    parts = (cuda or "").split(".")
    return (
        f"cuda-toolkit-{parts[0]}-{parts[1]}" if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit() else "cuda-toolkit"
    )
