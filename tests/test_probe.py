"""The probe against this very machine: its answers against independent tools, and what hangs against its timeouts."""

from __future__ import annotations

import ast
import contextlib
import glob
import json
import os
import pwd
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netcheck import probe
from netcheck.facts import FACTS, observe, questions
from netcheck.facts.mounts import parse_proc_mounts
from netcheck.gather import PROBE_SOURCE
from r4090c.model import Cluster, CpuFact, DiskFact, MemoryFact, NetFact, OsFact, PythonFact
from tests.facts.local import BOOTSTRAP, run_probe
from tests.facts.samples import cluster_of

root_only = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
UNAME: dict[str, Any] = {"natives": {"uname": {}}}


def tool(*argv: str) -> str:
    """Return what an independent tool prints; skip the test where it is not installed."""
    if not shutil.which(argv[0]):
        pytest.skip(f"{argv[0]} is not installed")
    return subprocess.run(argv, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}).stdout


def ask(question: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the answer to one question, asked beside another that must come back whole."""
    answers = run_probe({"q": question, "other": UNAME}, **options)["answers"]
    assert answers["other"]["natives"]["uname"]["nodename"] == os.uname().nodename
    answer: dict[str, Any] = answers["q"]
    return answer


def alive(pid: int) -> bool:
    """True while `pid` is a process that is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int, within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


# --------------------------------------------------------------------------- the node's Python


def test_the_probe_is_python_3_8_and_standard_library_only() -> None:
    tree = ast.parse(PROBE_SOURCE, feature_version=(3, 8))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    assert {name.partition(".")[0] for name in imported} <= set(sys.stdlib_module_names)
    # What costs milliseconds is imported by nobody; typing and collections.abc only for the type checker.
    assert not imported & {"socket", "threading", "subprocess", "glob", "re", "pathlib", "concurrent.futures"}


@pytest.mark.parametrize("minor", range(8, 16))
def test_the_probe_runs_under_every_python_here(minor: int) -> None:
    python = shutil.which(f"python3.{minor}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True).returncode != 0:
        pytest.skip(f"no python3.{minor} here")
    cluster = cluster_of()
    node = cluster.nodes[0]
    asked = {name: question.to_json() for name, question in questions(node, cluster).items()}
    answers = run_probe(asked, python=python)["answers"]
    assert set(answers) == set(FACTS)
    assert not any("probe" in answer["errors"] for answer in answers.values())


def test_the_program_fits_in_one_argument() -> None:
    """The whole program must fit in one argument of a command line (MAX_ARG_STRLEN), with room to grow."""
    import base64
    import zlib

    assert len(base64.b64encode(zlib.compress(PROBE_SOURCE.encode(), 9))) < 60_000


# --------------------------------------------------------------------------- against independent tools


@pytest.fixture(scope="module")
def here() -> tuple[Cluster, dict[str, Any]]:
    """A cluster whose second node is an address of this machine, and all facts of this machine."""
    cluster = cluster_of(("localhost", "node02"), python=sys.executable)
    node = cluster.nodes[0]
    sent = time.time()
    result = run_probe({name: question.to_json() for name, question in questions(node, cluster).items()})
    result.update(sent_at_s=sent, received_at_s=time.time())
    facts = {name: observe(name, result, node, cluster) for name in FACTS}
    return cluster, dict(facts)


def observed_now(name: str) -> Any:
    """Return one fact of this machine as it is at this moment: other tests come and go on it."""
    cluster = cluster_of(("localhost", "node02"), python=sys.executable)
    node = cluster.nodes[0]
    result = run_probe({name: questions(node, cluster)[name].to_json()}) | {"sent_at_s": 0.0, "received_at_s": 1.0}
    return observe(name, result, node, cluster).value


def value(here: tuple[Cluster, dict[str, Any]], name: str) -> Any:
    fact = here[1][name]
    assert fact.known, fact
    return fact.value


def test_os_against_uname(here: tuple[Cluster, dict[str, Any]]) -> None:
    os_fact: OsFact = value(here, "os")
    assert tool("uname", "-nrm").split() == [os_fact.hostname, os_fact.kernel, os_fact.machine]
    assert tool("sh", "-c", '. /etc/os-release; echo "$ID $VERSION_ID"').strip() == os_fact.distribution
    assert os_fact.uptime_s == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME), abs=30)


def test_user_against_id(here: tuple[Cluster, dict[str, Any]]) -> None:
    user = value(here, "user")
    assert tool("id", "-u").strip() == str(user.uid)
    assert tool("id", "-un").strip() == user.name
    assert user.home == pwd.getpwuid(os.getuid()).pw_dir


def test_cpus_against_lscpu_and_sysconf(here: tuple[Cluster, dict[str, Any]]) -> None:
    cpus: CpuFact = value(here, "cpus")
    assert len(cpus.online) == os.sysconf("SC_NPROCESSORS_ONLN")
    assert set(cpus.allowed) == os.sched_getaffinity(0)

    def flat(entries: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
        for entry in entries:
            yield entry["field"].rstrip(":"), entry["data"] or ""
            yield from flat(entry.get("children", []))

    told = dict(flat(json.loads(tool("lscpu", "-J"))["lscpu"]))
    assert cpus.model == " ".join(told["Model name"].split())
    assert cpus.sockets == int(told["Socket(s)"])
    assert len(cpus.cores) == int(told["Socket(s)"]) * int(told["Core(s) per socket"])
    assert {len(core) for core in cpus.cores} == {int(told["Thread(s) per core"])}
    assert len(cpus.numa) == int(told.get("NUMA node(s)", 0))
    assert sorted(cpu for core in cpus.cores for cpu in core) == list(cpus.online)


def test_memory_against_free_and_df() -> None:
    before = tool("free", "-m").splitlines()
    memory: MemoryFact = observed_now("memory")
    free = tool("free", "-m").splitlines()
    assert memory.total_mib == pytest.approx(int(free[1].split()[1]), abs=1)
    least, most = sorted(int(told[1].split()[6]) for told in (before, free))
    assert least * 0.8 <= memory.available_mib <= most * 1.2
    assert memory.swap_mib == pytest.approx(int(free[2].split()[1]), abs=1)
    assert memory.shm_total_mib == int(tool("df", "-B1", "--output=size", "/dev/shm").split()[1]) >> 20


def test_limits_against_a_shells_ulimit(here: tuple[Cluster, dict[str, Any]]) -> None:
    limits = value(here, "limits")
    told = tool("bash", "-c", "ulimit -Sl; ulimit -Sn; ulimit -Ss; ulimit -Su").split()
    expected = [None if text == "unlimited" else int(text) * unit for text, unit in zip(told, (1024, 1, 1024, 1), strict=True)]
    assert [limits.memlock_bytes, limits.nofile, limits.stack_bytes, limits.nproc] == expected


def test_limits_are_those_of_the_probes_own_shell() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = min(soft, 777)
    question = {"natives": {"rlimits": ["nofile"]}}
    answer = ask(question, prefix=["sh", "-c", f'ulimit -Sn {lower}; exec "$@"', "sh"])
    assert answer["natives"]["rlimits"]["nofile"] == [lower, None if hard == resource.RLIM_INFINITY else hard]


def test_network_against_ip() -> None:
    def told() -> dict[str, tuple[object, ...]]:
        return {
            link["ifname"]: (
                link["mtu"],
                link["operstate"],
                link["address"],
                sorted(f"{one['local']}/{one['prefixlen']}" for one in link["addr_info"]),
                link["ifname"] == "lo" or "linkinfo" in link,
            )
            for link in json.loads(tool("ip", "-j", "-d", "addr"))
        }

    before = told()
    net: NetFact = observed_now("net")
    after = told()  # labs of other tests come and go meanwhile
    seen = {
        iface.name: (iface.mtu, iface.operstate.upper(), iface.mac, sorted(iface.addresses), iface.virtual)
        for iface in net.ifaces
    }
    assert before.keys() & after.keys() <= seen.keys() <= before.keys() | after.keys()
    steady = [name for name, link in before.items() if after.get(name) == link]
    assert "lo" in steady
    assert {name: seen[name] for name in steady} == {name: before[name] for name in steady}


def test_routes_and_names_against_ip_and_getent() -> None:
    targets = ["127.0.0.1", "::1", "192.0.2.200", "203.0.113.9", "localhost"]
    answer = ask({"natives": {"route": targets, "resolve": ["localhost", "no-such-name.invalid"]}, "timeout_s": 8}, limit_s=30)
    for target in targets[:4]:
        done = subprocess.run(["ip", "-j", "route", "get", target], capture_output=True, text=True)
        told = answer["natives"]["route"][target]
        if done.returncode == 0:
            route = json.loads(done.stdout)[0]
            assert (told["iface"], told["source"]) == (route["dev"], route.get("prefsrc"))
        else:
            assert told["error"].lower() in done.stderr.lower(), done.stderr
    assert answer["natives"]["route"]["localhost"]["iface"] == "lo"
    assert answer["natives"]["resolve"]["localhost"] == list(
        dict.fromkeys(line.split()[0] for line in tool("getent", "ahosts", "localhost").splitlines())
    )
    assert answer["natives"]["resolve"]["no-such-name.invalid"] == []


@root_only
def test_secondary_addresses_and_a_source_that_is_on_another_interface() -> None:
    """What a connected UDP socket and SIOCGIFCONF get wrong: one address on two interfaces, a route with another's source."""
    setup = (
        "ip link add d0 type veth peer name d1; ip link set d0 up; ip link set d1 up; ip link set lo up;"
        "ip addr add 10.1.0.1/24 dev d0; ip addr add 10.1.0.2/24 dev d0; ip addr add 10.1.0.1/32 dev d1;"
        "ip addr add 10.3.0.1 peer 10.3.0.2/32 dev d1; ip route add 10.2.0.0/16 dev d1 src 10.1.0.2;"
        'ip route add unreachable 10.9.0.0/16; exec "$@"'
    )
    question = {"natives": {"addresses": {}, "route": ["10.2.0.9", "10.1.0.77", "10.9.0.1", "8.8.8.8"]}}
    answer = ask(question, prefix=["unshare", "-n", "sh", "-ec", setup, "sh"])
    ipv4 = sorted(pair for pair in answer["natives"]["addresses"] if ":" not in pair[1] and pair[0] != "lo")
    assert ipv4 == [["d0", "10.1.0.1/24"], ["d0", "10.1.0.2/24"], ["d1", "10.1.0.1/32"], ["d1", "10.3.0.1/32"]]
    routes = answer["natives"]["route"]
    assert (routes["10.2.0.9"]["iface"], routes["10.2.0.9"]["source"]) == ("d1", "10.1.0.2")
    assert (routes["10.1.0.77"]["iface"], routes["10.1.0.77"]["source"]) == ("d0", "10.1.0.1")
    assert routes["10.9.0.1"] == {"error": "No route to host"}
    assert routes["8.8.8.8"] == {"error": "Network is unreachable"}


def test_mounts_against_findmnt() -> None:
    def told() -> Counter[tuple[str, str]]:
        listed = json.loads(tool("findmnt", "-J", "-l", "-o", "TARGET,FSTYPE"))["filesystems"]
        return Counter((mount["target"], mount["fstype"]) for mount in listed)

    before = told()
    seen = Counter((m.target, m.fstype) for m in parse_proc_mounts(ask({"files": ["/proc/mounts"]})["files"]["/proc/mounts"]))
    after = told()  # others may mount and unmount meanwhile
    assert before & after <= seen <= before | after


def test_disks_against_df() -> None:
    before = tool("df", "-B1", "--output=avail", "/tmp").split()[1]
    disks: dict[str, DiskFact] = {disk.path: disk for disk in observed_now("disks")}
    assert set(disks) == {"/mnt/shared", "/mnt/shared/r4090c/runs", "/tmp", str(Path.home())}
    size, free, fstype, inodes = tool("df", "-B1", "--output=size,avail,fstype,iavail", "/tmp").splitlines()[1].split()
    tmp = disks["/tmp"]
    assert tmp.total_gib == int(size) / 2**30
    least, most = sorted(int(told) / 2**30 for told in (before, free))
    assert tmp.free_gib is not None and least - 0.5 <= tmp.free_gib <= most + 0.5
    assert tmp.fstype == fstype
    assert tmp.free_inodes == pytest.approx(int(inodes), rel=0.01)
    assert tmp.writable is os.access("/tmp", os.W_OK)


def test_clock_of_this_machine_is_this_machines(here: tuple[Cluster, dict[str, Any]]) -> None:
    clock = value(here, "clock")
    assert abs(clock.offset_s) <= clock.error_bound_s < 5
    running = tool("ps", "-eo", "comm=").split()
    assert (clock.daemon is not None) is any(
        name in ("chronyd", "ntpd", "systemd-timesyn", "ptp4l", "phc2sys") for name in running
    )


def test_python_against_its_own_metadata(here: tuple[Cluster, dict[str, Any]]) -> None:
    python: PythonFact = value(here, "python")
    assert python.version == sys.version.split()[0]
    script = "import importlib.metadata as m, json; print(json.dumps([[d.name, d.version] for d in m.distributions() if d.name]))"
    told = json.loads(tool(sys.executable, "-I", "-c", script))
    import re

    assert python.packages.items() >= {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in told}.items()


# --------------------------------------------------------------------------- files


def test_globs_against_the_standard_library() -> None:
    for pattern in (
        "/sys/class/net/*",
        "/sys/devices/system/cpu/cpu*/topology/core_id",
        "/etc/*.conf",
        "/no/such/*",
        "/proc/self",
    ):
        assert sorted(p for p in probe.expand(pattern) if Path(p).exists()) == sorted(glob.glob(pattern))  # noqa: PTH207


@given(st.text(st.sampled_from("ab*."), min_size=1, max_size=5), st.sets(st.text(st.sampled_from("ab."), min_size=1, max_size=5)))
def test_one_star_matches_like_fnmatch(part: str, names: set[str]) -> None:
    import fnmatch
    import tempfile

    names -= {".", ".."}
    if part.count("*") != 1:
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            (Path(folder) / name).touch()
        assert sorted(probe.expand(f"{folder}/{part}")) == sorted(f"{folder}/{n}" for n in fnmatch.filter(names, part))


def test_missing_files_are_told_only_when_they_were_named() -> None:
    answer = ask({"files": ["/etc/no-such-file", "/etc/no-such-*", "/sys/class/net/*/no-such-attribute", "/proc/version"]})
    assert answer["errors"] == {"/etc/no-such-file": "No such file or directory"}
    assert list(answer["files"]) == ["/proc/version"]


def test_long_files_are_cut_and_the_cut_is_told(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("x" * (probe.FILE_CAP_BYTES + 1))
    (tmp_path / "just").write_text("x" * probe.FILE_CAP_BYTES)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00abc")
    answer = ask({"files": [f"{tmp_path}/*"]})
    assert answer["errors"] == {f"{tmp_path}/long": f"cut at {probe.FILE_CAP_BYTES} bytes"}
    assert {name: len(text) for name, text in answer["files"].items()} == {
        f"{tmp_path}/long": probe.FILE_CAP_BYTES,
        f"{tmp_path}/just": probe.FILE_CAP_BYTES,
        f"{tmp_path}/bytes": 6,
    }


def test_a_fifo_and_a_device_in_the_place_of_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    started = time.monotonic()
    answer = ask({"files": [f"{tmp_path}/fifo", "/dev/zero"], "timeout_s": 5})
    assert time.monotonic() - started < 3
    assert answer["errors"] == {f"{tmp_path}/fifo": "not a regular file", "/dev/zero": "not a regular file"}


def test_access_listdir_and_readlink(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("")
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    natives = {
        "listdir": [f"{tmp_path}", f"{tmp_path}/no*"],
        "access": [f"{tmp_path}/a", f"{tmp_path}/c"],
        "readlink": [f"{tmp_path}/*"],
    }
    answer = ask({"natives": natives})["natives"]
    assert answer["listdir"] == {f"{tmp_path}": ["a", "b", "link"]}
    assert answer["access"] == {f"{tmp_path}/a": "rwx", f"{tmp_path}/c": None}
    assert answer["readlink"] == {f"{tmp_path}/link": "nowhere"}


def test_processes_by_name() -> None:
    with subprocess.Popen(["sleep", "30"]) as sleeper:
        try:
            answer = ask({"natives": {"processes": ["sleep", "no-such-process", "no-such-process-with-a-long-name"]}})
        finally:
            sleeper.kill()
    assert answer["natives"]["processes"] == {"found": ["sleep"], "hidden": False}


def test_gids_in_use_only(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0/ports/1"
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True)
    (port / "gids/0").write_text("fe80:0000:0000:0000:0e42:a1ff:fe79:60cc\n")
    (port / "gid_attrs/types/0").write_text("RoCE v2\n")
    (port / "gids/1").write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    (port / "gid_attrs/types/1").write_text("never read\n")
    (port / "gids/12").write_text("0000:0000:0000:0000:0000:ffff:0a1f:0412\n")
    answer = ask({"natives": {"gids": [f"{tmp_path}/*/ports/*"]}})
    assert sorted(path.removeprefix(f"{port}/") for path in answer["natives"]["gids"]) == [
        "gid_attrs/types/0",
        "gids/0",
        "gids/12",
    ]


# --------------------------------------------------------------------------- one bad question takes no other along


@pytest.mark.parametrize(
    "question",
    [
        {"natives": {"no-such-native": {}}},
        {"natives": {"rlimits": ["no-such-limit"]}},
        {"natives": {"statvfs": 7}},
        {"natives": {"disk": [7]}},
        {"natives": {"python": ["/no/such/python"]}},
        {"natives": {"route": ["not a name", ""]}},
        {"natives": 7},
        {"files": 7},
        {"files": ["/proc/no-such"]},
        {"timeout_s": "soon"},
        {"command": 7},
        {"command": ["/etc/passwd"]},
        {"command": ["true\0"]},
        7,
        None,
    ],
    ids=repr,
)
def test_a_bad_question_is_told_in_its_own_answer(question: Any) -> None:
    answers = run_probe({"q": question, "other": {**UNAME, "command": ["echo", "hello"]}})["answers"]
    assert answers["other"]["command"] == {"rc": 0, "stdout": "hello\n", "stderr": "", "error": None}
    assert answers["other"]["natives"]["uname"]["sysname"] == "Linux"
    text = json.dumps(answers["q"])
    assert answers["q"]["errors"] or '"error": "' in text, text


# --------------------------------------------------------------------------- commands


def test_command_output_status_and_signal() -> None:
    assert ask({"command": ["sh", "-c", "echo out; echo err >&2; exit 3"]})["command"] == {
        "rc": 3,
        "stdout": "out\n",
        "stderr": "err\n",
        "error": None,
    }
    assert ask({"command": ["sh", "-c", "kill -SEGV $$"]})["command"]["rc"] == -signal.SIGSEGV
    assert ask({"command": ["no-such-tool", "-x"]})["command"] == {
        "rc": None,
        "stdout": "",
        "stderr": "",
        "error": "not installed",
    }


def test_command_gets_no_input_the_c_locale_and_the_sbin_folders() -> None:
    script = 'cat; echo "$LC_ALL"; echo "$PATH"'
    answer = ask({"command": ["sh", "-c", script], "timeout_s": 5}, env={"PATH": "/usr/bin:/bin", "LC_ALL": "de_DE.UTF-8"})
    locale, path = answer["command"]["stdout"].splitlines()
    assert locale == "C"
    assert {"/usr/sbin", "/sbin", "/usr/local/bin"} <= set(path.split(":"))


def test_a_hung_command_is_killed_with_its_children_at_its_timeout(tmp_path: Path) -> None:
    script = (
        f"trap '' TERM HUP INT; sleep 60 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/parent; echo begun; wait; sleep 60"
    )
    started = time.monotonic()
    answer = ask({"command": ["sh", "-c", script], "timeout_s": 0.7})
    assert 0.7 <= time.monotonic() - started < 3
    assert answer["command"] == {"rc": None, "stdout": "begun\n", "stderr": "", "error": "no answer in 0.7 s"}
    assert gone(int((tmp_path / "child").read_text()))
    assert gone(int((tmp_path / "parent").read_text()))


def test_a_stopped_command_is_killed_at_its_timeout(tmp_path: Path) -> None:
    answer = ask({"command": ["sh", "-c", f"echo $$ > {tmp_path}/pid; kill -STOP $$; echo never"], "timeout_s": 0.5})
    assert answer["command"]["error"] == "no answer in 0.5 s"
    assert answer["command"]["stdout"] == ""
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_command_that_leaves_something_behind_is_not_waited_for(tmp_path: Path) -> None:
    started = time.monotonic()
    answer = ask({"command": ["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; echo done"], "timeout_s": 20})
    assert time.monotonic() - started < 5
    assert answer["command"] == {"rc": 0, "stdout": "done\n", "stderr": "", "error": None}
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_command_that_closes_its_output_and_runs_on_is_cut(tmp_path: Path) -> None:
    answer = ask({"command": ["sh", "-c", f"echo $$ > {tmp_path}/pid; exec >&- 2>&-; sleep 60"], "timeout_s": 0.7})
    assert answer["command"]["error"] == "no answer in 0.7 s"
    assert gone(int((tmp_path / "pid").read_text()))


def test_endless_output_is_bounded() -> None:
    answer = ask({"command": ["head", "-c", "30000000", "/dev/zero"], "timeout_s": 15}, limit_s=40)
    assert answer["command"]["rc"] == 0
    assert probe.OUTPUT_CAP_BYTES <= len(answer["command"]["stdout"]) < probe.OUTPUT_CAP_BYTES + 70_000


def test_questions_wait_side_by_side() -> None:
    started = time.monotonic()
    answers = run_probe({f"q{i}": {"command": ["sleep", "0.6"], "timeout_s": 5} for i in range(8)})["answers"]
    assert time.monotonic() - started < 3
    assert all(answer["command"]["rc"] == 0 for answer in answers.values())


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A control group whose tasks do not die of SIGKILL while it is frozen: what uninterruptible sleep looks like."""
    group = Path("/sys/fs/cgroup/freezer") / f"r4090c-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "freezer.state").read_text()
    except OSError:
        pytest.skip("needs root and the freezer of cgroup v1")
    try:
        yield group
    finally:
        (group / "freezer.state").write_text("THAWED")
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.02)


def test_what_does_not_die_is_left_behind(freezer: Path, tmp_path: Path) -> None:
    freeze = f"echo $$ > {tmp_path}/pid; echo $$ > {freezer}/cgroup.procs; echo FROZEN > {freezer}/freezer.state; echo never"
    started = time.monotonic()
    answer = ask({"command": ["sh", "-c", freeze], "timeout_s": 0.7}, limit_s=10)
    assert time.monotonic() - started < 3
    assert answer["command"]["error"] == "no answer in 0.7 s"
    assert alive(int((tmp_path / "pid").read_text())), "the test proves nothing: SIGKILL worked"


# --------------------------------------------------------------------------- paths that hang, names that do not answer

HUNG_MOUNT = """
import ctypes, os, subprocess, sys
fuse = os.open("/dev/fuse", os.O_RDWR)  # a file system whose server never answers
options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % fuse
if ctypes.CDLL(None, use_errno=True).mount(b"hung", sys.argv[1].encode(), b"fuse", 0, options):
    sys.exit("mount: " + os.strerror(ctypes.get_errno()))
sys.exit(subprocess.run(sys.argv[2:]).returncode)
"""


@root_only
@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="needs /dev/fuse")
def test_hung_paths_are_cut_and_hide_no_other(tmp_path: Path) -> None:
    hung = tmp_path / "hung"
    hung.mkdir()
    question = {
        "files": [f"{hung}/*/x", "/proc/version"],
        "natives": {
            "disk": [f"{hung}", f"{hung}/runs", "/tmp"],
            "python": [f"{hung}/bin/python"],
            "statvfs": [f"{hung}"],
            "affinity": {},
        },
        "timeout_s": 0.8,
    }
    prefix = ["unshare", "-m", "--propagation", "private", sys.executable, "-c", HUNG_MOUNT, str(hung)]
    started = time.monotonic()
    answer = ask(question, prefix=prefix)
    assert time.monotonic() - started < 5
    silent = "no answer in 0.8 s"
    assert answer["natives"]["disk"][f"{hung}"] == {"error": silent}
    assert answer["natives"]["disk"][f"{hung}/runs"] == {"error": silent}
    assert answer["natives"]["disk"]["/tmp"]["exists"] is True
    assert answer["natives"]["python"] == {f"{hung}/bin/python": {"error": silent}}
    assert answer["natives"]["affinity"]
    assert answer["errors"] == {f"{hung}/*/x": silent, "statvfs": silent}
    assert list(answer["files"]) == ["/proc/version"]


@root_only
@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="needs /dev/fuse")
def test_a_child_that_does_not_die_keeps_nothing_of_ours_open(freezer: Path, tmp_path: Path) -> None:
    """An SSH channel ends when its streams close: a child stuck below a hung mount must not hold them."""
    hung = tmp_path / "hung"
    hung.mkdir()
    argv = ["unshare", "-m", "--propagation", "private", sys.executable, "-c", HUNG_MOUNT, str(hung)]
    argv += [sys.executable, "-I", "-S", "-c", BOOTSTRAP, PROBE_SOURCE]
    request = json.dumps({"questions": {"q": {"natives": {"disk": [str(hung)]}, "timeout_s": 2.5}}})
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdin is not None
        running.stdin.write(request)
        running.stdin.close()
        running.stdin = None
        stuck = next_descendant(running.pid, depth=2)
        (freezer / "cgroup.procs").write_text(str(stuck))
        (freezer / "freezer.state").write_text("FROZEN")
        started = time.monotonic()
        try:
            out, errors = running.communicate(timeout=10)
        finally:
            running.kill()
    assert time.monotonic() - started < 6
    assert json.loads(out)["answers"]["q"]["natives"]["disk"] == {str(hung): {"error": "no answer in 2.5 s"}}
    assert errors == ""
    assert alive(stuck), "the test proves nothing: SIGKILL worked"


def parent_of(pid: str) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def next_descendant(pid: int, depth: int) -> int:
    """Return the child (of the child …) of `pid`, waiting for it to appear."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        found = pid
        for _ in range(depth):
            children = [int(e.name) for e in Path("/proc").iterdir() if e.name.isdigit() and parent_of(e.name) == found]
            if not children:
                break
            found = children[0]
        else:
            return found
        time.sleep(0.01)
    raise AssertionError("no such child")


@root_only
def test_a_name_server_that_does_not_answer_is_cut(tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text("nameserver 10.9.9.9\n")
    (tmp_path / "nsswitch.conf").write_text("hosts: files dns\npasswd: files\n")
    setup = (
        "ip link set lo up; ip link add d0 type veth peer name d1; ip link set d0 up; ip link set d1 up;"
        "ip addr add 10.9.0.1/16 dev d0; ip neigh add 10.9.9.9 lladdr 02:00:00:00:00:01 dev d0;"
        f"for f in resolv.conf nsswitch.conf; do mount --bind {tmp_path}/$f /etc/$f; done; "
        'exec "$@"'
    )
    question = {
        "natives": {"resolve": ["silent.example.org", "localhost"], "route": ["silent.example.org", "10.9.0.7"]},
        "timeout_s": 1,
    }
    started = time.monotonic()
    answer = ask(question, prefix=["unshare", "-mn", "--propagation", "private", "sh", "-ec", setup, "sh"])["natives"]
    assert 1 <= time.monotonic() - started < 4
    assert answer["resolve"]["silent.example.org"] == {"error": "no answer in 1 s"}
    assert answer["resolve"]["localhost"]
    assert answer["route"]["silent.example.org"] == {"error": "no answer in 1 s"}
    assert answer["route"]["10.9.0.7"]["iface"] == "d0"


def test_disk_of_a_path_not_made_yet(tmp_path: Path) -> None:
    answer = ask({"natives": {"disk": [f"{tmp_path}/a/b/c", f"{tmp_path}", "~"]}})["natives"]["disk"]
    assert (answer[f"{tmp_path}/a/b/c"]["exists"], answer[f"{tmp_path}/a/b/c"]["probed"]) == (False, str(tmp_path))
    assert answer[f"{tmp_path}"]["exists"] is True
    assert answer["~"]["path"] == str(Path.home())


@root_only
def test_disk_mounted_twice_with_a_blank_and_read_only(tmp_path: Path) -> None:
    """Of two mounts on one target the later one is seen; a read-only one is not writable, not even for root."""
    target = tmp_path / "with blank"
    target.mkdir()
    link = tmp_path / "link"
    link.symlink_to(target)
    mounts = (
        f'mount -t tmpfs -o size=64k one "{target}"; mount -t ramfs two "{target}"; mount -o remount,ro "{target}"; exec "$@"'
    )
    prefix = ["unshare", "-m", "--propagation", "private", "sh", "-ec", mounts, "sh"]
    answer = ask({"natives": {"disk": [str(link)]}}, prefix=prefix)["natives"]["disk"][str(link)]
    assert (answer["source"], answer["fstype"], answer["target"], answer["writable"]) == ("two", "ramfs", str(target), False)


# --------------------------------------------------------------------------- a Python


def fake_python(folder: Path, *, body: str) -> Path:
    path = folder / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def python_answer(path: Path, timeout_s: float = 10) -> dict[str, Any]:
    answer: dict[str, Any] = ask({"natives": {"python": [str(path)]}, "timeout_s": timeout_s})["natives"]["python"][str(path)]
    return answer


@pytest.mark.parametrize(
    ("cfg", "version"),
    [
        ("home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.11.7\n", "3.11.7"),
        ("home = /usr/bin\nimplementation = CPython\nversion_info = 3.11.7.final.0\nvirtualenv = 20.26.6\n", "3.11.7"),
        ("home = /usr/bin\nuv = 0.8.0\nversion_info = 3.11.7\ninclude-system-site-packages = FALSE\n", "3.11.7"),
    ],
    ids=["venv", "virtualenv", "uv"],
)
def test_a_virtual_environment_is_not_started(tmp_path: Path, cfg: str, version: str) -> None:
    python = fake_python(tmp_path, body=f"touch {tmp_path}/started")
    (tmp_path / "pyvenv.cfg").write_text(cfg)
    site = tmp_path / "lib/python3.11/site-packages"
    site.mkdir(parents=True)
    (tmp_path / "lib/python3.10/site-packages/torch-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "lib64").symlink_to("lib")
    for name in ("torch-2.13.0.dist-info", "old-1.egg-info", "torch", "mine.pth"):
        (site / name).mkdir()
    answer = python_answer(python)
    assert answer["version"] == version
    assert [sorted(folder) for folder in answer["distributions"]] == [["old-1.egg-info", "torch-2.13.0.dist-info"]]
    assert not (tmp_path / "started").exists()


def test_a_conda_environment_is_not_started(tmp_path: Path) -> None:
    python = fake_python(tmp_path, body=f"touch {tmp_path}/started")
    (tmp_path / "conda-meta").mkdir()
    (tmp_path / "conda-meta/python-3.12.4-h99e199e_1.json").write_text("{}")
    (tmp_path / "conda-meta/python-dateutil-2.9.0-py312h_2.json").write_text("{}")
    (tmp_path / "lib/python3.12/site-packages/torch-2.9.0.dist-info").mkdir(parents=True)
    assert python_answer(python) == {"version": "3.12.4", "distributions": [["torch-2.9.0.dist-info"]], "told_by": "conda-meta"}
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    "cfg", ["", "version = 3.11.7\ninclude-system-site-packages = true\n", "version = 3.99.1\n", "\0\xff = ="]
)
def test_any_other_layout_is_asked(tmp_path: Path, cfg: str) -> None:
    python = fake_python(tmp_path, body=f'exec {sys.executable} -I "$@"')
    if cfg:
        (tmp_path / "pyvenv.cfg").write_text(cfg)
    answer = python_answer(python)
    assert answer["version"] == sys.version.split()[0]
    assert any(name.startswith("hypothesis-") for folder in answer["distributions"] for name in folder)


def test_a_python_that_hangs_is_killed(tmp_path: Path) -> None:
    python = fake_python(tmp_path, body=f"echo $$ > {tmp_path}/pid; kill -STOP $$")
    assert python_answer(python, 0.7) == {"error": "no answer in 0.7 s"}
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("echo error while loading shared libraries: libpython3.11.so >&2; exit 127", "libpython3.11.so"),
        ("exit 1", "nothing was printed"),
        ("echo 7", "no answer: 7"),
        ('echo \'{"error": "odd"}\'', "odd"),
    ],
)
def test_a_python_that_does_not_answer(tmp_path: Path, body: str, error: str) -> None:
    assert error in python_answer(fake_python(tmp_path, body=body))["error"]


def test_a_python_that_is_not_there(tmp_path: Path) -> None:
    assert python_answer(tmp_path / "bin/python") == {"error": "not there"}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to("python3.4")
    assert python_answer(tmp_path / "bin/python") == {"error": "a link to python3.4, which is not there"}
    (tmp_path / "bin/python3.4").write_text("")
    assert python_answer(tmp_path / "bin/python") == {"error": "not executable by this account"}
    assert python_answer(tmp_path / "bin") == {"error": "not executable by this account"}


# --------------------------------------------------------------------------- the route native against a real connected socket


def test_the_source_address_is_the_one_a_connection_gets() -> None:
    """rtnetlink says what connecting says; connecting a UDP socket sends nothing."""
    for target in ("127.0.0.1", "192.0.2.200"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            try:
                udp.connect((target, 9))
            except OSError:
                continue
            assert probe.route_to(target)["source"] == udp.getsockname()[0]


@root_only
@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv")
def test_an_account_that_may_start_no_process_still_tells_the_rest() -> None:
    """Fork and thread fail with EAGAIN: told where they were needed, and what is read in this process comes all the same."""
    python = next((p for p in ("/usr/bin/python3", "/usr/local/bin/python3") if os.access(p, os.X_OK)), None)
    if python is None:
        pytest.skip("no Python that another account may run")
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "prlimit", "--nproc=1"]
    question = {"natives": {"disk": ["/tmp"], "passwd": {}, "affinity": {}}, "command": ["true"], "files": ["/proc/version"]}
    answer = ask(question, prefix=drop, python=python)
    busy = "Resource temporarily unavailable"
    assert answer["natives"]["disk"] == {"/tmp": {"error": busy}}
    assert answer["command"]["error"] == busy
    assert "thread" in answer["errors"]["passwd"]
    assert answer["natives"]["affinity"]
    assert list(answer["files"]) == ["/proc/version"]
