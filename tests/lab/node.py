"""One node: its folder in the lab, the script that becomes pid 1 of its pid namespace, its sshd.

D/nodes/<node>/bin        what the node sees as /usr/local/bin: drop stand-ins here, from outside and at any time
               home       root's home on the node
               etc/       hosts, hostname, passwd, shadow of the node (write in place: they are bound file by file)
               sshd.log, init.log
"""

from __future__ import annotations

import json
import re
import resource
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.lab.wiring import ENVIRONMENT, LabError

FRESH = (("/tmp", "1777", "16g"), ("/dev/shm", "1777", "16g"), ("/run", "755", "1g"), ("/var/log", "755", "1g"))
"""What a node has of its own, empty at each start: mount point, mode, most it may hold. /dev/shm is above the 8 GiB the
preflight demands. /run, so that nothing of this machine's systemd is seen; /var/log, so that lastlog and wtmp stay ours."""

LOCAL_BIN = Path("/usr/local/bin")

CAP_SYS_RESOURCE = 24
"""Number of the capability that raises hard limits (linux/capability.h)."""


@dataclass(frozen=True, slots=True)
class LabNode:
    """Where one node is."""

    name: str
    address: str
    namespace: str
    folder: Path

    @property
    def init_script(self) -> str:
        """The script of pid 1. As an argument it also marks the processes that are this node."""
        return str(self.folder / "init.sh")

    @property
    def start_sshd_script(self) -> str:
        """The script that starts the node's sshd; it runs inside the node."""
        return str(self.folder / "start_sshd.sh")

    @property
    def sshd_config(self) -> str:
        """The sshd's configuration file; its name marks the listener."""
        return str(self.folder / "sshd_config")

    @property
    def ready_file(self) -> Path:
        """Exists once the node's network and sshd were started."""
        return self.folder / "ready"

    def start(self, token: str) -> subprocess.Popen[bytes]:
        """Start the node and return the process that stands for it: `unshare`, whose death ends all of the node.

        `nsenter --net` instead of `ip netns exec`, which would remount /sys outside of the node's mount namespace.
        """
        self.ready_file.unlink(missing_ok=True)
        (self.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        unshare = ["unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        with (self.folder / "init.log").open("ab") as log:
            return subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self.namespace}", *unshare, "/bin/bash", self.init_script, token],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )

    def log_tail(self, lines: int = 8) -> str:
        """Return the last lines of the node's own logs."""
        texts = [
            path.read_text(errors="replace") for path in (self.folder / "init.log", self.folder / "sshd.log") if path.exists()
        ]
        return "\n".join("\n".join(texts).splitlines()[-lines:]) or "(its logs are empty)"


@cache
def limits() -> tuple[str, int]:
    """Return memlock (KiB or "unlimited") and nofile of a node: ample where root may raise them, else all that root has here."""
    capabilities = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:"))
    if int(capabilities.split()[1], 16) >> CAP_SYS_RESOURCE & 1:
        return "unlimited", min(1_048_576, int(Path("/proc/sys/fs/nr_open").read_text()))
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    nofile = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return "unlimited" if memlock == resource.RLIM_INFINITY else str(memlock // 1024), nofile


@cache
def openssh_version() -> tuple[int, int]:
    """Return the version of the installed OpenSSH, (0, 0) when it does not say."""
    done = subprocess.run(["ssh", "-V"], capture_output=True, text=True, env=ENVIRONMENT)
    match = re.search(r"OpenSSH_(\d+)\.(\d+)", done.stderr + done.stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def sshd_path() -> str | None:
    """Return the absolute path of sshd (it starts itself again and so needs one), or None."""
    return shutil.which("sshd", path=ENVIRONMENT["PATH"])


def python_folders(python: str) -> list[Path]:
    """Return every folder that `python` needs to run: its environment's, its installation's, and where else it imports from."""
    asked = "[sys.prefix, sys.base_prefix, os.path.realpath(sys.executable), *filter(os.path.isdir, sys.path[1:])]"
    question = f"import json, os, sys; print(json.dumps({asked}))"
    done = subprocess.run([python, "-c", question], capture_output=True, text=True, env=ENVIRONMENT)
    if done.returncode != 0:
        raise LabError(f"{python} does not run: {done.stderr.strip()}")
    prefix, base_prefix, executable, *others = map(Path, json.loads(done.stdout))
    return [Path(python).parent, prefix, base_prefix, executable.parent, *others]


def kept_below(mount_point: str, wanted: Iterable[Path]) -> list[Path]:
    """Return those of `wanted` that a mount at `mount_point` would hide, outermost only.

    Raises LabError when one of them is the mount point itself.
    """
    hidden: list[Path] = []
    for path in sorted(wanted, key=lambda path: len(path.parts)):
        if path == Path(mount_point):
            raise LabError(f"{path} cannot be seen on the nodes: each has a {mount_point} of its own")
        if path.is_relative_to(mount_point) and not any(path.is_relative_to(other) for other in hidden):
            hidden.append(path)
    return hidden


def write_init_script(node: LabNode, prefix_length: int, keep: Sequence[Path], python: str) -> None:
    """Write the script of pid 1: mounts, network, sshd, then wait and reap.

    `keep`: folders that the node must see at the same path although one of the FRESH mounts lies over them. Each mount is
    built aside and moved into place, so its source stays reachable until then. `-n`: /run, where mount keeps its table,
    is moved too.
    """
    stage, etc = shlex.quote(str(node.folder / "stage")), node.folder / "etc"
    lines = [
        "#!/bin/bash",
        f"# pid 1 of {node.name}; unshare made every mount private before this runs",
        "set -eu",
        "cd /",
        f"echo {node.name} > /proc/sys/kernel/hostname",
        "umount -n -R /run/netns 2>/dev/null || true  # else a running lab would hold the namespaces of other labs",
        "# a sysfs mounted in this network namespace shows its own /sys/class/net; control groups are carried over",
        "if mountpoint -q /sys/fs/cgroup; then",
        f"  mount -n --rbind /sys/fs/cgroup {stage}; mount -n -t sysfs sysfs /sys; mount -n --move {stage} /sys/fs/cgroup",
        "else",
        "  mount -n -t sysfs sysfs /sys",
        "fi",
    ]
    for mount_point, mode, size in FRESH:
        if not Path(mount_point).is_dir():
            continue
        lines.append(f"mount -n -t tmpfs -o mode={mode},size={size} lab {stage}")
        for path in kept_below(mount_point, keep):
            inside = f"{stage}/{shlex.quote(str(path.relative_to(mount_point)))}"
            lines.append(f"mkdir -p {inside}; mount -n --bind {shlex.quote(str(path))} {inside}")
        lines.append(f"mount -n --move {stage} {mount_point}")
    lines.append("mkdir -p -m 755 /run/sshd /run/lock")
    for name in ("hosts", "hostname", "passwd", "shadow"):
        if Path("/etc", name).exists():
            lines.append(f"mount -n --bind {shlex.quote(str(etc / name))} /etc/{name}")
    lines.append(f"mount -n --bind {shlex.quote(str(node.folder / 'boot_id'))} /proc/sys/kernel/random/boot_id")
    own_bin = shlex.quote(str(node.folder / "bin"))
    executable = Path(python).resolve()
    if executable.parent == LOCAL_BIN:  # the python of container images: it must outlive the mount below
        lines.append(f"touch {own_bin}/{executable.name}; mount -n --bind {executable} {own_bin}/{executable.name}")
    lines += [
        f"mount -n --rbind {own_bin} {LOCAL_BIN}",
        "ip -batch - <<NETWORK",
        "link set lo up",
        f"address replace {node.address}/{prefix_length} dev eth0",
        "link set eth0 up",
        "NETWORK",
        f"/bin/bash {shlex.quote(node.start_sshd_script)}",
        f"touch {shlex.quote(str(node.ready_file))}",
        "# bash reaps whatever loses its parent; reading a pipe that nobody writes to waits without a child of its own",
        f"exec 9<> {shlex.quote(str(node.folder / 'init.fifo'))}",
        "while :; do read -r -u 9 _ || true; done",
    ]
    Path(node.init_script).write_text("\n".join(lines) + "\n")


def write_sshd(node: LabNode, authorized_keys: Path) -> None:
    """Write the sshd's configuration and the script that starts it, with limits that pass the preflight."""
    folder = node.folder
    config = {
        "ListenAddress": f"{node.address}:22",
        "HostKey": f'"{folder}/host_key"',
        "PidFile": "none",
        "AuthorizedKeysFile": f'"{authorized_keys}" .ssh/authorized_keys',
        "StrictModes": "no",
        "PermitRootLogin": "prohibit-password",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "UsePAM": "no",
        "UseDNS": "no",
        "PrintMotd": "no",
        "PrintLastLog": "no",
        "X11Forwarding": "no",
        "MaxStartups": "1000",
        "MaxSessions": "1000",
        "LogLevel": "INFO",
        "Subsystem": "sftp internal-sftp",
    }
    if openssh_version() >= (9, 8):
        config["PerSourcePenalties"] = "no"  # else a test of refused keys locks the controller out of the next test
    Path(node.sshd_config).write_text("".join(f"{key} {value}\n" for key, value in config.items()))
    memlock, nofile = limits()
    environment = shlex.join(f"{name}={value}" for name, value in ENVIRONMENT.items())
    Path(node.start_sshd_script).write_text(
        "#!/bin/bash\n"
        f"ulimit -l {memlock}; ulimit -n {nofile}; ulimit -c 0\n"
        f"exec env -i {environment} {sshd_path()} -f {shlex.quote(node.sshd_config)} -E {shlex.quote(str(folder / 'sshd.log'))}\n"
    )


def write_etc(node: LabNode, hosts: Mapping[str, str]) -> None:
    """Write the node's hosts, hostname, passwd and shadow. Only root's home differs from this machine's passwd."""
    etc = node.folder / "etc"
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{address} {name}" for name, address in hosts.items()]
    (etc / "hosts").write_text("\n".join(lines) + "\n")
    (etc / "hostname").write_text(f"{node.name}\n")
    accounts = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines() if line.count(":") == 6]
    for account in accounts:
        if account[0] == "root":
            account[5], account[6] = str(node.folder / "home"), "/bin/bash"
    (etc / "passwd").write_text("".join(":".join(account) + "\n" for account in accounts))
    # "*": no password fits and yet the account is not locked ("!"), which sshd would refuse
    (etc / "shadow").write_text("".join(f"{account[0]}:*:19000:0:99999:7:::\n" for account in accounts))
    (etc / "shadow").chmod(0o600)


def write_python3(node: LabNode, python: str) -> None:
    """Give the node a `python3` where this machine has none outside of /usr/local/bin."""
    if shutil.which("python3", path="/usr/bin:/bin") is None:
        stand_in = node.folder / "bin" / "python3"
        stand_in.write_text(f'#!/bin/sh\nexec {shlex.quote(str(Path(python).resolve()))} "$@"\n')
        stand_in.chmod(0o755)


def write_trust(node: LabNode, key: Path, known_hosts: Path) -> None:
    """Let root of the node log in to all nodes: with the client's key, which every node lets in, and their host keys."""
    folder = node.folder / "home" / ".ssh"
    folder.mkdir(mode=0o700)
    shutil.copy2(key, folder / "id_ed25519")  # copy2: ssh refuses a key that others may read
    shutil.copyfile(known_hosts, folder / "known_hosts")


def make_host_key(node: LabNode) -> str:
    """Make the node's ed25519 host key and return its known_hosts line."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", node.name, "-f", str(node.folder / "host_key")],
        check=True,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
    )
    kind, key, *_ = (node.folder / "host_key.pub").read_text().split()
    return f"{node.name},{node.address} {kind} {key}\n"
