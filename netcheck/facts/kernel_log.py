"""What matters of the kernel log since boot: from dmesg, or the journal where dmesg is refused or has dropped its beginning.

Only asked where cluster.yaml states GPUs: their Xids are what it is for. The node picks out the lines: a log has thousands.
"""

from __future__ import annotations

from dataclasses import replace

from netcheck.facts.question import Question, Reply
from netcheck.tools import kernel_log
from r4090c.errors import ParseError
from r4090c.model import Cluster, KernelLog, Node

NAME = "kernel_log"
NOT_READABLE = "kernel log not readable as this user"
NOBODY_READS = 77
"""Exit status of SCRIPT when neither told anything: an unprivileged journalctl ends with 0 and prints nothing."""
LINES = (
    r"NVRM: Xid|AER|PCIe Bus Error|error status/mask|\[ ?[0-9]{1,2}\]|Hardware Error|Killed process|nfs: server|available PCIe"
    r"|Linux version"
)
"""For `grep -E`: every line that netcheck.tools.kernel_log reads (a test compares)."""
SCRIPT = f"""log=$(dmesg 2>/dev/null)
case $log in
*'[    0.000000]'*) ;;
*)
  journal=$(timeout 5 journalctl -k -b -q -o short-monotonic --no-pager 2>/dev/null)
  [ -z "$journal" ] || log=$journal ;;
esac
[ -n "$log" ] || exit {NOBODY_READS}
printf '%s\\n' "$log" | head -n 1
printf '%s\\n' "$log" | grep -aE '{LINES}'
exit 0
"""
"""dmesg shows a ring that drops its oldest lines. The first line tells the parser that there is a log, whatever else matters."""


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`."""
    return Question(command=("sh", "-c", SCRIPT) if node.gpus else None, timeout_s=10)


def parse(reply: Reply) -> KernelLog:
    """Return what matters of the log. Raises ParseError, with NOT_READABLE where this account may not see it."""
    if reply.command is None and not reply.errors:
        raise ParseError("not asked: cluster.yaml states no GPUs for this node")
    output = reply.output()
    if output.rc == NOBODY_READS:
        raise ParseError(NOT_READABLE)
    if output.rc != 0:
        raise ParseError(f"sh ended with {output.rc}: {output.stderr.strip()[:200]}")
    log = kernel_log.parse(output.stdout)
    return replace(log, since_s=kernel_log.stamp(output.stdout.partition("\n")[0])[1])
