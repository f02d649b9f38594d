"""`nvidia-smi topo -p2p r` (or w, n, a, p): between which GPUs the driver grants peer-to-peer access."""

from __future__ import annotations

import re

from netcheck.tools._matrix import gpu_index, read_matrix
from r4090c.errors import ParseError
from r4090c.model import P2pMatrix

TOOL = "nvidia-smi-p2p"
COMMAND = "nvidia-smi topo -p2p r"
STATUS = re.compile(r"OK|CNS|GNS|TNS|NS|DR|U")
"""The codes of its legend."""


def parse(text: str) -> P2pMatrix:
    """Return the matrix. Raises ParseError for an incomplete one, or for none, with the words of nvidia-smi."""
    matrix = read_matrix(text, STATUS)
    index = {name: gpu_index(name) for name in matrix.names}
    if None in index.values():
        raise ParseError(f"not only GPUs: {', '.join(matrix.names)[:120]}")
    pairs = {(one, other): cell for (one, other), cell in matrix.cells.items() if one != other}
    if "X" in pairs.values():
        raise ParseError("an X between two different GPUs: a damaged matrix")
    return P2pMatrix(
        gpus=tuple(number for number in index.values() if number is not None),
        cells={f"{index[one]}-{index[other]}": cell for (one, other), cell in pairs.items()},
    )
