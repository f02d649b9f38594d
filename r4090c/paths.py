"""Own every file name below the shared folder and below `runs/<id>/`; nothing else joins these paths.

Paths are POSIX paths on the nodes: the controller need not mount them.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True, slots=True)
class SharedPaths:
    """Layout below `paths.shared`."""

    root: PurePosixPath

    @property
    def code(self) -> PurePosixPath:
        """Synced code trees, one folder per content hash."""
        return self.root / "r4090c" / "code"

    @property
    def data(self) -> PurePosixPath:
        """Prepared data sets."""
        return self.root / "r4090c" / "data"

    @property
    def runs(self) -> PurePosixPath:
        """Run folders; cluster.yaml `paths.runs` may name another place."""
        return self.root / "r4090c" / "runs"

    def code_tree(self, digest: str) -> PurePosixPath:
        """The tree whose content hash is `digest` (hex)."""
        return self.code / digest[:16]


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Layout of one run folder (contract: README, `runs/<id>/`)."""

    root: PurePosixPath

    @property
    def run_id(self) -> str:
        """The run's id: the folder's name."""
        return self.root.name

    @property
    def plan(self) -> PurePosixPath:
        """Exactly what was run, of the last attempt."""
        return self.root / "plan.json"

    @property
    def facts(self) -> PurePosixPath:
        """The facts the plan was made from."""
        return self.root / "facts.json"

    @property
    def recipe(self) -> PurePosixPath:
        """The resolved recipe that the run trains by: written by rank 0 once an attempt's has been found to fit the run."""
        return self.root / "recipe.json"

    @property
    def events(self) -> PurePosixPath:
        """One JSON object a line: starts, deaths, ends."""
        return self.root / "events.jsonl"

    @property
    def metrics(self) -> PurePosixPath:
        """One JSON object an optimizer step."""
        return self.root / "metrics.jsonl"

    @property
    def heartbeats(self) -> PurePosixPath:
        """`<global rank>.json` each: step and time of the last step."""
        return self.root / "heartbeats"

    @property
    def agents(self) -> PurePosixPath:
        """`<node>.json` each: pid, process group, heartbeat, state."""
        return self.root / "agents"

    @property
    def checkpoints(self) -> PurePosixPath:
        """Checkpoints, one folder a step; `latest` names the last complete one."""
        return self.root / "checkpoints"

    @property
    def diagnosis(self) -> PurePosixPath:
        """Why the last attempt ended: the first cause."""
        return self.root / "diagnosis.json"

    @property
    def between(self) -> PurePosixPath:
        """Who is about to start the next attempt, and until when that holds. The start removes it."""
        return self.root / "between.json"

    @property
    def stop(self) -> PurePosixPath:
        """Who ended the run by `r4090c stop`: no supervisor starts it again. The next launch removes it."""
        return self.root / "stop.json"

    def agent(self, node: str) -> PurePosixPath:
        """State file of one node's agent."""
        return self.agents / f"{node}.json"

    def attempt(self, number: int) -> PurePosixPath:
        """Log folder of attempt `number` (from 1)."""
        return self.root / f"attempt_{number}"

    def attempt_plan(self, number: int) -> PurePosixPath:
        """What attempt `number` ran; `plan` is that of the last attempt."""
        return self.attempt(number) / "plan.json"

    def attempt_diagnosis(self, number: int) -> PurePosixPath:
        """Why attempt `number` ended; `diagnosis` is that of the last attempt."""
        return self.attempt(number) / "diagnosis.json"

    def attempt_recipe(self, number: int) -> PurePosixPath:
        """The resolved recipe that the training script reads in attempt `number`."""
        return self.attempt(number) / "recipe.json"

    def stacks(self, number: int, rank: int) -> PurePosixPath:
        """Where a rank stood when it hung (launch/hang.py)."""
        return self.attempt(number) / f"stacks-{rank}.txt"

    def flight(self, number: int, rank: int) -> PurePosixPath:
        """What torch's flight recorder had of a rank that hung (launch/hang.py)."""
        return self.attempt(number) / f"flight-{rank}"

    def rank_log(self, number: int, rank: int) -> PurePosixPath:
        """Log of one global rank in attempt `number`."""
        return self.attempt(number) / f"{rank}.log"

    def torchrun_log(self, number: int, node: str) -> PurePosixPath:
        """What torchrun on `node` printed in attempt `number`."""
        return self.attempt(number) / f"torchrun-{node}.log"


def new_run_id(recipe: str, now_s: float | None = None) -> str:
    """Return a sortable, unique run id like `tiny-20261130-014212-a3f1` (UTC)."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_s))
    return f"{recipe}-{stamp}-{secrets.token_hex(2)}"
