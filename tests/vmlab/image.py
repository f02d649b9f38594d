"""The disk of a node: Debian packages, the distribution's own kernel, an initrd and a PID 1 of ours.

mmdebstrap makes the root folder in half a minute on a quick mirror; nothing of it runs on this machine but package scripts in
a chroot, inside mount and pid namespaces that die with this process. No loop device, no initramfs-tools: mke2fs -d makes the
file system, `_initrd` the initrd. The mirror is the one that this machine's own apt uses.
"""

from __future__ import annotations

import gzip
import lzma
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.lab.wiring import ENVIRONMENT
from tests.vmlab import store
from tests.vmlab.store import VmLabError, tell

SUITE = "trixie"
"""Debian 13: its perftest (25.01) writes valid JSON, that of Debian 12 does not."""

PACKAGES = (
    "busybox-static",  # the initrd's only program
    "chrony",
    "ethtool",
    "ibverbs-providers",  # librxe
    "ibverbs-utils",
    "infiniband-diags",
    "iperf3",
    "iproute2",
    "iputils-ping",
    "kmod",
    "netbase",
    "nfs-common",
    "nfs-kernel-server",
    "nftables",  # to drop and lose packets
    "openssh-client",
    "openssh-server",
    "pciutils",
    "perftest",
    "procps",
    "python3",
    "rdma-core",
    "util-linux",
)

EARLY_MODULES = ("virtio_pci", "virtio_blk", "crc32c_generic", "ext4", "virtio_net")
"""What the initrd loads: disk, file system, network cards. PID 1 finds its eth0 there at once."""

MODULES = (
    "rdma_rxe",
    "crc32_generic",  # rdma_rxe asks the crypto layer for "crc32" by name; depmod does not list that
    "ib_uverbs",
    "rdma_ucm",
    "rdma_cm",
    "ib_umad",
    "nfs",
    "nfsv4",
    "nfs_layout_nfsv41_files",
    "nfs_layout_flexfiles",
    "nf_tables",
    "nft_numgen",
    "nfsd",
    "virtio_rng",
    "af_packet",
    "dummy",
    "md5",
    "sha256_generic",
)

KEPT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")

ROOM_MIB = 1024
"""Free space on a node's disk: captures, logs, test files. The image is sparse."""

GUEST = Path(__file__).resolve().parent / "guest"

TOOLS = {"mmdebstrap": "mmdebstrap", "mke2fs": "e2fsprogs", "cpio": "cpio", "depmod": "kmod", "dpkg-deb": "dpkg"}
"""Program -> Debian package."""

DEBIAN_RELEASES = ("bullseye", "bookworm", "trixie", "forky", "sid", "oldstable", "stable", "testing", "unstable")

PUBLIC_KEY, PRIVATE_KEY, HOST_KEY = "id_ed25519.pub", "id_ed25519", "host_key.pub"


def key() -> str:
    """Return the key of the image: this file and all that goes into the guest decide it."""
    return store.key_of(Path(__file__).read_bytes(), *(path.read_bytes() for path in sorted(GUEST.iterdir())))


def why_not() -> str | None:
    """Return why no image can be built here, or None when one can."""
    if os.uname().machine != "x86_64":
        return f"the nodes are x86_64 machines and their packages are installed natively; this machine is {os.uname().machine}"
    missing = {package for program, package in TOOLS.items() if shutil.which(program, path=ENVIRONMENT["PATH"]) is None}
    if missing:
        return f"building the image needs: apt-get install {' '.join(sorted(missing))}"
    if os.geteuid() != 0:
        return "building the image needs root (mmdebstrap makes device files and other users' files)"
    return None


def take() -> Path:
    """Return the folder of the image; built first where there is none. Raises VmLabError."""
    return store.take("image", key(), _build)


def apt_mirror() -> str:
    """Return the Debian mirror this machine's apt uses ($R4090C_VMLAB_MIRROR overrides it). Raises VmLabError."""
    stated = os.environ.get("R4090C_VMLAB_MIRROR")
    if stated:
        return stated
    words = ["apt-get", "indextargets", "--format", "$(RELEASE) $(COMPONENT) $(REPO_URI)", "Created-By: Packages"]
    done = subprocess.run(words, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        release, component, mirror = line.split(" ", 2)
        if release in DEBIAN_RELEASES and component == "main":
            return mirror
    raise VmLabError("this machine's apt has no Debian mirror: name one in $R4090C_VMLAB_MIRROR")


def _apt_options() -> list[str]:
    """Return this machine's apt settings for how to fetch (proxy, certificates, retries, clock), as apt.conf lines."""
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True).stdout
    wanted = re.compile(r"Acquire::(?:(?:http|https)::\S+|Retries|Check-Date|Check-Valid-Until) ", re.IGNORECASE)
    return ['Acquire::Languages "none";', *(line for line in dump.splitlines() if wanted.match(line))]


def _build(folder: Path, lock: int) -> None:
    """Build the image into `folder`."""
    why = why_not()
    if why:
        raise VmLabError(why)
    started = time.monotonic()
    mirror = apt_mirror()
    tell(f"building the image (Debian {SUITE}): minutes on a slow mirror; log: {folder}/build.log")
    root = folder / "root"
    _bootstrap(root, folder / "kernel", mirror, folder / "build.log", lock)
    tell(f"packages installed after {time.monotonic() - started:.0f} s")
    version = _install_kernel(root, folder / "kernel", folder)
    _configure(root, folder)
    _file_system(root, folder / "root.ext4")
    for scratch in (root, folder / "kernel"):
        shutil.rmtree(scratch)
    for name in ("vmlinuz", "initrd.gz", "root.ext4"):
        (folder / name).chmod(0o444)  # the nodes write to overlays
    tell(f"image with Linux {version} built in {time.monotonic() - started:.0f} s")


def _bootstrap(root: Path, kernel: Path, mirror: str, log: Path, lock: int) -> None:
    """Make the root folder and unpack the kernel package beside it (installing it would build an initrd for minutes).

    The lock goes along: after a SIGKILL of ours nobody builds while the last `dpkg` is still writing. setpriv and unshare
    see to it that everything dies with us, and that no mount of the chroot is ever seen outside.
    """
    fetch_kernel = (
        f"mkdir -p {shlex.quote(str(kernel))} && cd {shlex.quote(str(kernel))} && export APT_CONFIG=$MMDEBSTRAP_APT_CONFIG && "
        "apt-get -o APT::Sandbox::User=root download "
        "$(apt-cache depends --important linux-image-amd64 | sed -n 's/.*Depends: //p') && dpkg-deb -x *.deb . && rm *.deb"
    )
    argv = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    argv += ["mmdebstrap", "--mode=root", "--variant=minbase", "--components=main", f"--include={','.join(PACKAGES)}"]
    argv += [f"--aptopt={line}" for line in _apt_options()]
    argv += [f"--dpkgopt=path-exclude={pattern}" for pattern in KEPT_OUT]
    argv += ["--dpkgopt=force-unsafe-io", f"--customize-hook={fetch_kernel}", SUITE, str(root), mirror]
    proxies = {name: value for name, value in os.environ.items() if name.lower() in ("http_proxy", "https_proxy", "no_proxy")}
    with log.open("wb") as output:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**ENVIRONMENT, **proxies, "LC_ALL": "C"},
            pass_fds=[lock],
        )
    if done.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise VmLabError(f"mmdebstrap ended with {done.returncode}:\n{tail}")


# ------------------------------------------------------------------------------------------ kernel and initrd


def module_name(path: str) -> str:
    """Return the name of a module file: "kernel/fs/nfs/nfs-ssc.ko.xz" is nfs_ssc."""
    return Path(path).name.split(".ko")[0].replace("-", "_")


def closure(wanted: Iterable[str], dependencies: Mapping[str, Sequence[str]], builtin: Iterable[str]) -> list[str]:
    """Return the files of the modules `wanted` and of all they depend on, in an order that insmod takes.

    `dependencies`: modules.dep, file -> files it needs. Raises VmLabError for a module the kernel does not have.
    """
    by_name = {module_name(path): path for path in dependencies}
    there = {module_name(path) for path in builtin}
    ordered: dict[str, None] = {}
    for name in wanted:
        if name in by_name:
            path = by_name[name]
            ordered.update(dict.fromkeys([*reversed(dependencies[path]), path]))
        elif name not in there:
            raise VmLabError(f"the kernel of Debian {SUITE} has no module {name}")
    return list(ordered)


def _install_kernel(root: Path, package: Path, folder: Path) -> str:
    """Put kernel and initrd into `folder` and the modules into `root`; return the kernel's version."""
    modules = next(package.glob("usr/lib/modules/*"), None) or next(package.glob("lib/modules/*"))
    version = modules.name
    shutil.copyfile(package / "boot" / f"vmlinuz-{version}", folder / "vmlinuz")
    if not (package / "lib").exists():
        (package / "lib").symlink_to("usr/lib")  # depmod looks below lib
    _run("depmod", "-b", str(package), version)
    lines = (modules / "modules.dep").read_text().splitlines()
    dependencies = {path: needs.split() for path, _, needs in (line.partition(":") for line in lines)}
    builtin = (modules / "modules.builtin").read_text().split()

    target = root / "lib" / "modules" / version
    for path in closure((*EARLY_MODULES, *MODULES), dependencies, builtin):
        place = target / path.removesuffix(".xz")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(_unpacked(modules / path))
    for name in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        shutil.copyfile(modules / name, target / name)
    _run("depmod", "-b", str(root), version)
    _initrd(root, [modules / path for path in closure(EARLY_MODULES, dependencies, builtin)], folder / "initrd.gz")
    return version


def _unpacked(module: Path) -> bytes:
    """Return a module uncompressed: the emulated processor would take longer than the disk."""
    data = module.read_bytes()
    return lzma.decompress(data) if module.suffix == ".xz" else data


def _initrd(root: Path, modules: Sequence[Path], target: Path) -> None:
    tree = target.with_suffix(".tree")
    for name in ("bin", "dev", "proc", "modules", "root"):
        (tree / name).mkdir(parents=True)
    shutil.copy(root / "usr" / "bin" / "busybox", tree / "bin" / "busybox")
    for index, module in enumerate(modules):
        (tree / "modules" / f"{index:02d}-{module_name(module.name)}.ko").write_bytes(_unpacked(module))
    shutil.copyfile(GUEST / "initrd.sh", tree / "init")
    (tree / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    words = ["cpio", "--create", "--format=newc", "--quiet", "--owner=0:0"]
    archive = subprocess.run(words, input=names.encode(), stdout=subprocess.PIPE, cwd=tree, check=True).stdout
    target.write_bytes(gzip.compress(archive, 1))
    shutil.rmtree(tree)


# ------------------------------------------------------------------------------------------ the node's files


def _configure(root: Path, folder: Path) -> None:
    """Write accounts, keys and configuration of both nodes: they share one disk image, the kernel command line tells them apart.

    The keys are made here, once per image, and are worth nothing outside of it: ssh is forwarded on the loopback interface only.
    """
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "vmlab", "-f", str(folder / PRIVATE_KEY))
    for old in (root / "etc" / "ssh").glob("ssh_host_*"):
        old.unlink()
    host_key = root / "etc" / "ssh" / "ssh_host_ed25519_key"
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "vmlab", "-f", str(host_key))
    shutil.copyfile(host_key.with_suffix(".pub"), folder / HOST_KEY)
    host_public = " ".join((folder / HOST_KEY).read_text().split()[:2])

    account = root / "root" / ".ssh"
    account.mkdir(mode=0o700, exist_ok=True)
    for source, name in ((PUBLIC_KEY, "authorized_keys"), (PRIVATE_KEY, PRIVATE_KEY)):
        shutil.copyfile(folder / source, account / name)
        (account / name).chmod(0o600)
    etc = {
        "hosts": "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n10.77.0.1 node01\n10.77.0.2 node02\n",
        "resolv.conf": "",  # mmdebstrap left this machine's; an unknown name is to fail at once
        "exports": "/mnt/shared 10.77.0.0/24(rw,sync,no_subtree_check,no_root_squash)\n",
        "ssh/ssh_known_hosts": f"node01,node02,10.77.0.1,10.77.0.2 {host_public}\n",
        "ssh/sshd_config": SSHD_CONFIG,
        "chrony/server.conf": "local stratum 8\nallow 10.77.0.0/24\ncmdport 0\n",
        "chrony/client.conf": "server node01 iburst minpoll 2 maxpoll 4\ncmdport 0\n",
    }
    for name, text in etc.items():
        path = root / "etc" / name
        path.unlink(missing_ok=True)
        path.write_text(text)
    (root / "etc" / "mtab").unlink(missing_ok=True)
    (root / "etc" / "mtab").symlink_to("/proc/self/mounts")
    init = root / "sbin" / "vmlab-init"
    shutil.copyfile(GUEST / "init.sh", init)
    init.chmod(0o755)


SSHD_CONFIG = """\
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
PrintLastLog no
MaxStartups 1000
MaxSessions 1000
PerSourcePenalties no
# The post-quantum exchange takes a second of an emulated processor.
KexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org
Subsystem sftp internal-sftp
"""


def _file_system(root: Path, target: Path) -> None:
    """Make an ext4 file system with the content of `root`. Without journal and checksums: a crashed node is thrown away."""
    used_mib = sum(path.lstat().st_blocks for path in root.rglob("*")) // 2048
    size = f"{used_mib * 5 // 4 + ROOM_MIB}M"
    _run("mke2fs", "-q", "-t", "ext4", "-O", "^has_journal,^metadata_csum", "-m", "0", "-d", str(root), str(target), size)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, env=ENVIRONMENT, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise VmLabError(f"`{' '.join(argv)}` ended with {done.returncode}: {(done.stderr or done.stdout).strip()}")
