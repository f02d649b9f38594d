"""The table of faults speaks the language of launch/causes.py, and what bench/chaos.py does is decided by its seed."""

from __future__ import annotations

from bench.chaos import KINDS, MOMENTS, case_of
from launch.causes import MENDS
from tests.lab.faults import FAULTS, role_of


def test_every_fault_has_a_name_of_its_own_and_is_done_somehow() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    assert [fault.id for fault in FAULTS if fault.strike is None and fault.ready is None] == []


def test_its_causes_exist_and_a_run_is_given_up_where_nothing_helps() -> None:
    for fault in FAULTS:
        mends = {MENDS[kind][0] for kind in fault.answer.kinds}
        assert (fault.answer.then == "given-up") == (mends == {"never"}), fault.id
        assert bool(mends) == (fault.answer.then in ("again", "elsewhere", "given-up")), fault.id


def test_processes_are_told_apart_by_their_command_lines() -> None:
    rank = "/usr/bin/python3 /shared/code/1f/train/main.py --recipe r.json"
    told = {
        "python3 -I -S /shared/code/1f/launch/agent.py daemon": "agent",
        "python3 -I -S /shared/code/1f/launch/agent.py follow {}": "follower",
        f"python3 -m torch.distributed.run --nnodes=2 --no-python {rank}": "torchrun",
        f"python3 /shared/code/1f/launch/rank.py -- {rank}": "rank",
        rank: "rank",
        "python3 /shared/code/1f/user/mine.py": "rank",
        "sshd: root@notty": None,
        "python3 -c pass": None,
    }
    assert {line: role_of(line) for line in told} == told


def test_the_seed_decides_a_case_and_all_faults_come_at_all_moments() -> None:
    cases = [case_of(7, number, real=False) for number in range(len(KINDS) * len(MOMENTS))]
    assert cases == [case_of(7, number, real=False) for number in range(len(cases))]
    assert cases != [case_of(8, number, real=False) for number in range(len(cases))]
    seen = {(case.fault, case.moment) for case in cases}
    assert len(seen) == len(KINDS) * len(MOMENTS) - 4, "who stops by hand is not stopped by hand again"
