"""What the controller remembers, in one SQLite file: preflight verdicts, launched runs, nightly samples.

The truth about a run is its run folder; this is history for people and for statistics. The file is
`$R4090C_STATE/r4090c.db`, by default `~/.local/state/r4090c/r4090c.db`.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from r4090c.errors import UsageError

SCHEMA = """
CREATE TABLE IF NOT EXISTS preflight (at REAL, cluster TEXT, nodes TEXT, verdict TEXT, findings TEXT);
CREATE TABLE IF NOT EXISTS run (id TEXT PRIMARY KEY, at REAL, cluster TEXT, recipe TEXT, nodes TEXT, run_dir TEXT);
CREATE TABLE IF NOT EXISTS night (id TEXT PRIMARY KEY, at REAL, cluster TEXT, recipe TEXT, fingerprint TEXT, summary TEXT);
CREATE TABLE IF NOT EXISTS sample (night TEXT, repeat INTEGER, nodes TEXT, ranks INTEGER, tokens_per_s REAL, detail TEXT);
"""


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


def record_preflight(cluster: str, nodes: Sequence[str], verdict: str, findings: Sequence[Mapping[str, Any]]) -> None:
    """Remember one preflight; only what is not a pass is kept of its findings."""
    notable = [finding for finding in findings if finding["status"] != "pass"]
    with _database() as database:
        database.execute(
            "INSERT INTO preflight VALUES (?,?,?,?,?)",
            (time.time(), cluster, json.dumps(list(nodes)), verdict, json.dumps(notable)),
        )


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
