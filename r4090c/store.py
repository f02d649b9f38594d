"""What the controller remembers, in one SQLite file: preflight verdicts, launched runs, nightly samples.

The truth about a run is its run folder; this is history for people and for statistics. The file is
`$R4090C_STATE/r4090c.db`, by default `~/.local/state/r4090c/r4090c.db`.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from r4090c.errors import UsageError
from r4090c.model import P2pProof, PortTest

SCHEMA = """
CREATE TABLE IF NOT EXISTS preflight (at REAL, cluster TEXT, nodes TEXT, verdict TEXT, findings TEXT);
CREATE TABLE IF NOT EXISTS preflight_record (at REAL, cluster TEXT, level TEXT, verdict TEXT, record BLOB);
CREATE TABLE IF NOT EXISTS run (id TEXT PRIMARY KEY, at REAL, cluster TEXT, recipe TEXT, nodes TEXT, run_dir TEXT);
CREATE TABLE IF NOT EXISTS night (id TEXT PRIMARY KEY, at REAL, cluster TEXT, recipe TEXT, fingerprint TEXT, summary TEXT);
CREATE TABLE IF NOT EXISTS sample (night TEXT, repeat INTEGER, nodes TEXT, ranks INTEGER, tokens_per_s REAL, detail TEXT);
CREATE TABLE IF NOT EXISTS p2p (
    cluster TEXT, node TEXT, fingerprint TEXT, proven INTEGER, date TEXT, reason TEXT, PRIMARY KEY (cluster, node)
);
CREATE TABLE IF NOT EXISTS resting (cluster TEXT, node TEXT, until REAL, why TEXT, PRIMARY KEY (cluster, node));
CREATE TABLE IF NOT EXISTS port (
    cluster TEXT, node TEXT, port TEXT, passed INTEGER, carries INTEGER, date TEXT, reason TEXT, PRIMARY KEY (cluster, node, port)
);
"""


RECORDS_KEPT = 30
"""Records of preflights of one cluster; est.: a month of nights. One takes 3 KiB (4 nodes) to 40 KiB (16 nodes, all pairs)."""
VERDICTS_KEPT = 1000
"""Verdicts of one cluster; est.: years. One takes a few KiB when much is wrong."""


def state_folder() -> Path:
    """Return the folder of the controller's own state."""
    default = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "r4090c"
    return Path(os.environ.get("R4090C_STATE") or default)


@contextmanager
def _database() -> Iterator[sqlite3.Connection]:
    folder = state_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(folder / "r4090c.db", timeout=10)
    except (OSError, sqlite3.Error) as error:
        raise UsageError(
            str(folder), f"cannot keep history there: {error}", "a writable folder", "export R4090C_STATE=FOLDER"
        ) from error
    try:
        with database:
            database.executescript(SCHEMA)
            yield database
    except sqlite3.Error as error:
        raise UsageError(
            str(folder / "r4090c.db"), str(error), "a healthy SQLite file", f"mv {folder}/r4090c.db {folder}/r4090c.db.broken"
        ) from error
    finally:
        database.close()


def record_preflight(
    cluster: str,
    nodes: Sequence[str],
    verdict: str,
    findings: Sequence[Mapping[str, Any]],
    record: Mapping[str, Any] | None = None,
) -> None:
    """Remember one preflight: of its findings what is not a pass, and `record` (netcheck.diff) to compare later ones with.

    Records have a table of their own, so that files of versions that knew none keep working, in both directions. Of a cluster the
    last RECORDS_KEPT stay, and the last fit one of each level; of the verdicts the last VERDICTS_KEPT.
    """
    notable = [finding for finding in findings if finding["status"] != "pass"]
    now = time.time()
    with _database() as database:
        database.execute(
            "INSERT INTO preflight VALUES (?,?,?,?,?)", (now, cluster, json.dumps(list(nodes)), verdict, json.dumps(notable))
        )
        _keep_last(database, "preflight", cluster, VERDICTS_KEPT)
        if record is None:
            return
        packed = zlib.compress(json.dumps(record, separators=(",", ":")).encode())
        database.execute("INSERT INTO preflight_record VALUES (?,?,?,?,?)", (now, cluster, str(record["level"]), verdict, packed))
        fit = "SELECT max(at) FROM preflight_record WHERE cluster=?1 AND verdict='fit' GROUP BY level"
        _keep_last(database, "preflight_record", cluster, RECORDS_KEPT, f"AND at NOT IN ({fit})")


def _keep_last(database: sqlite3.Connection, table: str, cluster: str, count: int, but: str = "") -> None:
    """Remove all but the last `count` rows of a cluster from a table."""
    last = f"SELECT at FROM {table} WHERE cluster=?1 ORDER BY at DESC LIMIT {count}"
    database.execute(f"DELETE FROM {table} WHERE cluster=?1 AND at NOT IN ({last}) {but}", (cluster,))


def preflight_records(cluster: str, before: str = "") -> list[dict[str, Any]]:
    """Return the remembered records of a cluster, the newest first; with `before` (ISO time) those that started earlier.

    A record that is damaged is left out.
    """
    with _database() as database:
        rows = database.execute("SELECT record FROM preflight_record WHERE cluster=? ORDER BY at DESC", (cluster,)).fetchall()
    found = []
    for (packed,) in rows:
        try:
            record = json.loads(zlib.decompress(packed))
        except (zlib.error, ValueError, TypeError):
            continue
        if isinstance(record, dict) and (not before or str(record.get("started_at", "")) < before):
            found.append(record)
    return found


def record_p2p(cluster: str, node: str, proof: P2pProof) -> None:
    """Remember what a two-arm test of P2P on a node showed, in the place of what was known of it."""
    with _database() as database:
        database.execute(
            "INSERT OR REPLACE INTO p2p VALUES (?,?,?,?,?,?)",
            (cluster, node, proof.fingerprint, proof.proven, proof.date, proof.reason),
        )


def p2p_proofs(cluster: str) -> dict[str, P2pProof]:
    """Return node -> what the last two-arm test of its P2P showed; whether the node is still the same is for the caller."""
    with _database() as database:
        rows = database.execute("SELECT node, fingerprint, proven, date, reason FROM p2p WHERE cluster=?", (cluster,)).fetchall()
    return {node: P2pProof(fingerprint, bool(proven), date, reason) for node, fingerprint, proven, date, reason in rows}


def record_ports(cluster: str, tests: Mapping[str, Mapping[str, PortTest]]) -> None:
    """Remember what the bandwidth test showed of RDMA ports (node -> port -> test), in the place of what was known of them."""
    rows = [
        (cluster, node, test.port, test.passed, test.carries, test.date, test.reason)
        for node, own in tests.items()
        for test in own.values()
    ]
    with _database() as database:
        database.executemany("INSERT OR REPLACE INTO port VALUES (?,?,?,?,?,?,?)", rows)


def port_tests(cluster: str) -> dict[str, dict[str, PortTest]]:
    """Return node -> RDMA port -> what its last bandwidth test showed."""
    with _database() as database:
        wanted = "SELECT node, port, passed, carries, date, reason FROM port WHERE cluster=?"
        rows = database.execute(wanted, (cluster,)).fetchall()
    found: dict[str, dict[str, PortTest]] = {}
    for node, port, passed, carries, date, reason in rows:
        found.setdefault(node, {})[port] = PortTest(port, bool(passed), bool(carries), date, reason)
    return found


def rest_node(cluster: str, node: str, until: float, why: str) -> None:
    """Remember that a node failed a run, and is not to be relied on before `until` (seconds since the epoch)."""
    with _database() as database:
        database.execute("INSERT OR REPLACE INTO resting VALUES (?,?,?,?)", (cluster, node, until, why))


def resting_nodes(cluster: str) -> dict[str, str]:
    """Return node -> why it failed a run lately, of the nodes that are still resting from that."""
    with _database() as database:
        wanted = "SELECT node, why FROM resting WHERE cluster=? AND until>? ORDER BY node"
        return dict(database.execute(wanted, (cluster, time.time())).fetchall())


def wake_node(cluster: str, node: str) -> bool:
    """Forget that a node failed a run; False when nothing was remembered of it."""
    with _database() as database:
        return database.execute("DELETE FROM resting WHERE cluster=? AND node=?", (cluster, node)).rowcount > 0


def record_run(run_id: str, cluster: str, recipe: str, nodes: Sequence[str], run_dir: str) -> None:
    """Remember that a run was launched (again, when it is resumed)."""
    with _database() as database:
        database.execute(
            "INSERT OR REPLACE INTO run VALUES (?,?,?,?,?,?)",
            (run_id, time.time(), cluster, recipe, json.dumps(list(nodes)), run_dir),
        )


def record_night(
    night: str, cluster: str, recipe: str, fingerprint: str, samples: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]
) -> None:
    """Remember one night: every raw sample and its summary."""
    with _database() as database:
        database.execute(
            "INSERT INTO night VALUES (?,?,?,?,?,?)", (night, time.time(), cluster, recipe, fingerprint, json.dumps(summary))
        )
        database.executemany(
            "INSERT INTO sample VALUES (?,?,?,?,?,?)",
            [
                (night, one["repeat"], json.dumps(list(one["nodes"])), one["ranks"], one["tokens_per_s"], json.dumps(dict(one)))
                for one in samples
            ],
        )


def nights(cluster: str, recipe: str, limit: int = 30) -> list[dict[str, Any]]:
    """Return the last nights of a cluster and recipe, the newest first."""
    with _database() as database:
        rows = database.execute(
            "SELECT id, at, fingerprint, summary FROM night WHERE cluster=? AND recipe=? ORDER BY at DESC LIMIT ?",
            (cluster, recipe, limit),
        ).fetchall()
    return [{"id": row[0], "at": row[1], "fingerprint": row[2], **json.loads(row[3])} for row in rows]
