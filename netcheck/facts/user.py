"""The account the tool logs in as."""

from __future__ import annotations

from netcheck.facts.question import Question, Reply, as_int, as_mapping, as_str
from r4090c.model import Cluster, Node, UserFact

NAME = "user"


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`. The entry may come from a directory server, hence the timeout."""
    return Question(natives={"passwd": {}}, timeout_s=5)


def parse(reply: Reply) -> UserFact:
    """Return the UserFact. Raises ParseError when the account has no passwd entry."""
    entry = as_mapping(reply.native("passwd"), "passwd")
    return UserFact(
        uid=as_int(entry.get("uid"), "uid"),
        gid=as_int(entry.get("gid"), "gid"),
        name=as_str(entry.get("name"), "name"),
        home=as_str(entry.get("home"), "home"),
        shell=as_str(entry.get("shell"), "shell"),
    )
