"""The attempts of one run, one after the other: what an attempt ended with goes in, the wish for the next one comes out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from launch.diagnose import Cause, mends
from launch.env import HIDDEN
from launch.jobs import find_run
from launch.plan import Plan
from launch.recipe import accumulation_of, world_sizes_allowed
from launch.restart import REST_S, Decision, Ended, Policy, Stock, decide
from launch.run import Wish
from r4090c.errors import R4090cError, UsageError
from r4090c.model import Cluster, Node
from r4090c.remote import Fleet, NodeError
from r4090c.store import rest_node, resting_nodes


@dataclass(frozen=True, slots=True)
class Next:
    """What follows an attempt: `wish` for the next one, None when there is none; `why` for a person."""

    wish: Wish | None
    why: str


class Attempts:
    """The attempts of one run so far. `say` tells a person what is waited for."""

    def __init__(self, fleet: Fleet, cluster: Cluster, wish: Wish, say: Callable[[str], None], policy: Policy) -> None:
        self.fleet, self.cluster, self.policy = fleet, cluster, policy
        self._wish, self._say = wish, say
        self._history: list[Ended] = []

    def after(self, plan: Plan, cause: Cause) -> Next:
        """Return what follows the attempt of `plan`, which ended with `cause`; takes as long as nodes are waited for."""
        names = tuple(node.name for node in plan.nodes)
        return self._after(plan, Ended(names, cause, mends(cause), self._saved_step(plan.run_id)))

    def after_no_start(self, plan: Plan, error: R4090cError) -> Next:
        """Return what follows an attempt that could not start; `plan`: of the one before."""
        if isinstance(error, UsageError):
            return Next(None, str(error))
        names = tuple(self._wish_nodes())
        node = error.culprit if error.culprit in names else "?"
        cause = Cause("start-failed", node, None, f"the next attempt could not start: {error}", "", error.next_command)
        return self._after(plan, Ended(names, cause, "again", self._saved_step(plan.run_id)))

    def _wish_nodes(self) -> Sequence[str]:
        return [node.name for node in self._wish.nodes]

    def _after(self, plan: Plan, ended: Ended) -> Next:
        self._history.append(ended)
        given = {name: var.value for name, var in plan.nodes[0].env.items() if var.origin == "--env"}
        hidden = sorted(name for name, value in given.items() if value == HIDDEN)
        since, told = time.monotonic(), ""
        while True:
            stock = self._stock(plan, time.monotonic() - since)
            decision = decide(self._history, stock, lambda nodes: self._refuses(plan, nodes), self.policy)
            for name, why in decision.rest.items():
                if name not in stock.resting:
                    rest_node(self.cluster.name, name, time.time() + REST_S, why)
                    self._say(f"{name} is left out for {REST_S / 60:.0f} min: {why}")
            if decision.go == "again" and hidden:
                return Next(None, f"the values of {', '.join(hidden)} are secret, and known to the launch that gave them only")
            if decision.go != "wait":
                return self._told(plan, decision)
            if decision.why != told:
                self._say(f"waiting: {decision.why}")
                told = decision.why
            time.sleep(decision.wait_s)
            stopped = self._stopped(plan.run_id)
            if stopped:
                return Next(None, stopped)

    def _told(self, plan: Plan, decision: Decision) -> Next:
        if decision.go == "give-up":
            return Next(None, decision.why)
        if decision.wait_s:
            self._say(f"starting again in {decision.wait_s:.0f} s")
            time.sleep(decision.wait_s)
        stopped = self._stopped(plan.run_id)  # in the meantime
        if stopped:
            return Next(None, stopped)
        known = {node.name: node for node in self.cluster.nodes}
        self._wish = replace(
            self._wish,
            nodes=tuple(known[name] for name in decision.nodes),
            nodes_chosen=True,
            nproc=len(plan.nodes[0].ranks),
            resume=plan.run_id,
            again=True,
            sets=(),
            label="",
        )
        return Next(self._wish, decision.why)

    def _saved_step(self, run_id: str) -> int | None:
        """Return the step of the run's last complete checkpoint; None when there is none, or nobody can tell."""
        try:
            saved = find_run(self.fleet, self.cluster, run_id).checkpoints
        except R4090cError:
            return self._history[-1].saved_step if self._history else None
        return int(saved[-1].rpartition("_")[2]) if saved else None

    def _stopped(self, run_id: str) -> str:
        """Return by whom the run was stopped since its last start, "" when it was not."""
        try:
            by = find_run(self.fleet, self.cluster, run_id).stopped_by
        except R4090cError:
            return ""
        return f"stopped by {by}" if by else ""

    def _stock(self, plan: Plan, waited_s: float) -> Stock:
        ours = {node.name for node in plan.nodes}
        wanted = [node for node in self.cluster.nodes if node.name in ours or node.spare]
        for node in wanted:
            self.fleet.drop(node.name)  # what was open may be open to a node that is gone
        answers = self.fleet.map(lambda shell: shell.run(["true"], timeout_s=10).rc == 0, [node.name for node in wanted])
        answering = frozenset(name for name, answer in answers.items() if not isinstance(answer, NodeError) and answer)
        return Stock(answering, tuple(_spares(self.cluster, ours)), resting_nodes(self.cluster.name), waited_s)

    def _refuses(self, plan: Plan, nodes: int) -> str | None:
        """Return why the run cannot go on with `nodes` nodes of as many ranks as now, None when it can."""
        ranks = nodes * len(plan.nodes[0].ranks)
        try:
            recipe = find_run(self.fleet, self.cluster, plan.run_id).resolved
            if recipe is None:
                return "its recipe cannot be read"
            accumulation_of(recipe, ranks)
        except R4090cError as error:
            return f"{error.culprit}: {error.observed}"
        return world_sizes_allowed(recipe, ranks, plan.world_size)


def _spares(cluster: Cluster, ours: set[str]) -> list[str]:
    return [node.name for node in cluster.nodes if node.spare and node.name not in ours]


def wish_of(plan: Plan, nodes: Sequence[Node]) -> Wish:
    """Return the wish that a run of a recipe was launched by, as far as its plan tells."""
    env = {name: var.value for name, var in plan.nodes[0].env.items() if var.origin == "--env"}
    options = plan.script[7:]  # after the script, and the three that every recipe's run is given
    bound = any(rank.cpus for node in plan.nodes for rank in node.ranks)
    return Wish(
        plan.recipe, nodes=tuple(nodes), nproc=len(plan.nodes[0].ranks), args=options, env=env, affinity=bound, hang=plan.hang
    )
