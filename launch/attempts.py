"""The attempts of one run, one after the other: what an attempt ended with goes in, the wish for the next one comes out."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from launch.diagnose import Cause, mends
from launch.env import HIDDEN
from launch.jobs import HOLD_S, STALE_S, Run, find_run, give_up, hold_between
from launch.plan import Plan, plan_json
from launch.recipe import world_sizes_allowed
from launch.restart import REST_S, Decision, Ended, Policy, Stock, decide
from launch.run import Wish, extra_arguments
from launch.supervise import Outcome, stop_run
from r4090c.errors import R4090cError, UsageError
from r4090c.model import Cluster, Node
from r4090c.remote import Fleet, NodeError
from r4090c.store import rest_node, resting_nodes

POLL_S = HOLD_S / 3
"""So two of three notes that this supervisor decides may be late."""


@dataclass(frozen=True, slots=True)
class Next:
    """What follows an attempt: `wish` for the next one, None when there is none; `why` for a person."""

    wish: Wish | None
    why: str


class Attempts:
    """The attempts of one run so far. `me`: this supervisor (launch.supervise.who_i_am). `say` tells what is waited for."""

    def __init__(
        self,
        fleet: Fleet,
        cluster: Cluster,
        wish: Wish,
        say: Callable[[str], None],
        policy: Policy,
        me: Mapping[str, str],
    ) -> None:
        self.fleet, self.cluster, self.policy, self.me = fleet, cluster, policy, me
        self._wish, self._say = wish, say
        self._history: list[Ended] = []
        self._decides = True
        """False = another supervisor is about to start the next attempt."""
        self._tried: Plan | None = None
        """The attempt that was announced last."""
        self._unstopped: tuple[str, ...] = ()
        """Nodes that the stop of an attempt which did not start has not reached yet."""

    def announcing(self, announce: Callable[[Plan], None]) -> Callable[[Plan], None]:
        """Return `announce` for `launch.run.start`, with the plan noted here: it may be there although its start failed."""

        def both(plan: Plan) -> None:
            self._tried = plan
            announce(plan)

        return both

    def after(self, plan: Plan, outcome: Outcome) -> Next:
        """Return what follows the attempt of `plan`, which did not end well; takes as long as nodes are waited for."""
        assert outcome.cause is not None
        names, left = tuple(node.name for node in plan.nodes), tuple(outcome.left)
        return self._after(plan, Ended(names, outcome.cause, mends(outcome.cause), self._saved_step(plan.run_id), left))

    def after_no_start(self, plan: Plan, error: R4090cError) -> Next:
        """Return what follows an attempt that could not start; `plan`: of the one before."""
        if isinstance(error, UsageError):
            return self._over(plan, str(error))
        run = self._run(plan.run_id)
        if run is not None and run.state in ("running", "done"):
            if not self._is_ours(run):
                return Next(None, f"it is {run.state}: somebody else has started attempt {run.attempt}")
            assert self._tried is not None
            self._unstopped = tuple(node.name for node in self._tried.nodes)
            self._end_what_started(plan)
        names = tuple(node.name for node in self._wish.nodes)
        node = error.culprit if error.culprit in names else "?"
        cause = Cause("start-failed", node, None, f"the next attempt could not start: {error}", "", error.next_command)
        return self._after(plan, Ended(names, cause, "again", self._saved_step(plan.run_id)))

    def _after(self, plan: Plan, ended: Ended) -> Next:
        self._history.append(ended)
        began, told = time.monotonic(), ""
        while True:
            refused = self._not_mine(plan)
            if refused:
                return self._over(plan, refused)
            stock = self._stock(plan, time.monotonic() - began)
            decision = decide(self._history, stock, self._sizes(plan), self.policy)
            self._rest(decision.rest, stock.resting)
            if decision.go == "wait":
                if decision.why != told:
                    self._say(f"waiting: {decision.why}")
                    told = decision.why
                time.sleep(min(decision.wait_s, POLL_S))
                continue
            if decision.go == "again" and decision.wait_s:
                refused = self._wait(plan, decision.wait_s)
            if decision.go == "give-up" or refused:
                return self._over(plan, refused or decision.why)
            return self._again(plan, decision)

    def _is_ours(self, run: Run) -> bool:
        """True when the run's last attempt is the one that was announced here."""
        return self._tried is not None and run.plan == json.loads(json.dumps(plan_json(self._tried)))

    def _end_what_started(self, plan: Plan) -> None:
        """Stop the attempt that was to start and did not everywhere, and wait until its folder no longer says that it runs."""
        stopped = stop_run(self.fleet, plan.run_id, self._unstopped, "the supervisor (its start failed)", follows=True)
        self._unstopped = tuple(stopped.unreachable)
        until = time.monotonic() + STALE_S
        while time.monotonic() < until:
            run = self._run(plan.run_id)
            if run is None or run.state != "running":
                return
            time.sleep(1.0)

    def _over(self, plan: Plan, why: str) -> Next:
        if self._decides:
            self.let_go(plan, why)
        return Next(None, why)

    def _wait(self, plan: Plan, wait_s: float) -> str:
        """Wait before the next attempt; return why there is to be none, "" when nothing speaks against it."""
        self._say(f"starting again in {wait_s:.0f} s")
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            time.sleep(min(POLL_S, max(0.0, until - time.monotonic())))
            refused = self._not_mine(plan)
            if refused:
                return refused
        return ""

    def _again(self, plan: Plan, decision: Decision) -> Next:
        given = {name: var.value for name, var in plan.nodes[0].env.items() if var.origin == "--env"}
        hidden = sorted(name for name, value in given.items() if value == HIDDEN)
        if hidden:
            told = f"the values of {', '.join(hidden)} are secret, and known to the launch that gave them only"
            return self._over(plan, told)
        if self._unstopped:
            self._end_what_started(plan)
        known = {node.name: node for node in self.cluster.nodes}
        self._wish = replace(
            self._wish,
            nodes=tuple(known[name] for name in decision.nodes),
            nodes_chosen=True,
            nproc=len(plan.nodes[0].ranks),
            resume=plan.run_id,
            again=True,
            queue=True,  # whoever took the GPUs in between gives them back some day
            sets=(),
            label="",
        )
        return Next(self._wish, decision.why)

    def _not_mine(self, plan: Plan) -> str:
        """Return why this supervisor is not to start the next attempt, "" when it is, which is noted for others to see."""
        run = self._run(plan.run_id)
        if run is not None and run.stopped_by:
            return f"stopped by {run.stopped_by}"
        if run is not None and run.attempt > plan.attempt and not self._is_ours(run):  # as after a night's sleep
            self._decides = False
            return f"somebody else has started attempt {run.attempt}: it is {run.state}"
        try:
            other = hold_between(self.fleet, plan.run_dir, self.me)
        except R4090cError:  # no node answers: nobody else gets further either
            return ""
        self._decides = other is None
        return f"{other} starts the next attempt" if other else ""

    def let_go(self, plan: Plan, why: str) -> None:
        """Note for those who look on why nobody starts another attempt."""
        with contextlib.suppress(R4090cError):  # no node answers: nobody looks on either
            give_up(self.fleet, plan.run_dir, why)

    def _run(self, run_id: str) -> Run | None:
        """Return the run as its folder tells, None when nobody can read it."""
        try:
            return find_run(self.fleet, self.cluster, run_id)
        except R4090cError:
            return None

    def _saved_step(self, run_id: str) -> int | None:
        """Return the step of the run's last complete checkpoint; None when there is none, or nobody can tell."""
        run = self._run(run_id)
        if run is None:
            return self._history[-1].saved_step if self._history else None
        return int(run.checkpoints[-1].rpartition("_")[2]) if run.checkpoints else None

    def _stock(self, plan: Plan, waited_s: float) -> Stock:
        ours = {node.name for node in plan.nodes} | {node.name for node in self._wish.nodes}
        spares = [node.name for node in self.cluster.nodes if node.spare and node.name not in ours]
        wanted = [node.name for node in self.cluster.nodes if node.name in ours or node.name in spares]
        for name in wanted:
            self.fleet.drop(name)  # what was open may be open to a node that is gone
        answers = self.fleet.map(lambda shell: shell.run(["true"], timeout_s=10).rc == 0, wanted)
        answering = frozenset(name for name, answer in answers.items() if not isinstance(answer, NodeError) and answer)
        return Stock(answering, tuple(spares), self._resting(), waited_s)

    def _sizes(self, plan: Plan) -> Callable[[int], str | None]:
        """Return a function that says why the run cannot go on with a number of nodes, None where it can.

        It reads the recipe when it is first called: mostly as many nodes go on, and nobody asks.
        """
        run = cache(lambda: self._run(plan.run_id))

        def refuses(nodes: int) -> str | None:
            if plan.steps is None:
                return "a script of one's own has so many ranks as it was given"
            found = run()
            if found is None or found.resolved is None:
                return "its recipe cannot be read"
            return world_sizes_allowed(found.resolved, nodes * len(plan.nodes[0].ranks), plan.world_size)

        return refuses

    def _resting(self) -> Mapping[str, str]:
        try:
            return resting_nodes(self.cluster.name)
        except UsageError as error:  # no history is no reason not to train
            self._say(f"which nodes failed lately cannot be read: {error}")
            return {}

    def _rest(self, rest: Mapping[str, str], known: Mapping[str, str]) -> None:
        """Remember nodes that are left out from now on."""
        for name, why in rest.items():
            if name in known:
                continue
            self._say(f"{name} is left out for {REST_S / 60:.0f} min: {why}")
            try:
                rest_node(self.cluster.name, name, time.time() + REST_S, why)
            except UsageError as error:
                self._say(f"that cannot be remembered: {error}")


def wish_of(plan: Plan, nodes: Sequence[Node]) -> Wish:
    """Return the wish that a run of a recipe was launched by, as far as its plan tells."""
    env = {name: var.value for name, var in plan.nodes[0].env.items() if var.origin == "--env"}
    bound = any(rank.cpus for node in plan.nodes for rank in node.ranks)
    return Wish(
        plan.recipe,
        nodes=tuple(nodes),
        nproc=len(plan.nodes[0].ranks),
        args=extra_arguments(plan),
        env=env,
        affinity=bound,
        hang=plan.hang,
        gate="--no-gate" not in plan.options,
        anyway="--anyway" in plan.options,
        policy=tuple(option for option in plan.options if option not in ("--no-gate", "--anyway")),
    )
