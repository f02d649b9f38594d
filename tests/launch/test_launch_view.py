"""What `r4090c launch` shows of a metrics line, and what it refuses before it looks at the cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from r4090c.cli.follow import told_in
from r4090c.cli.launch import command
from r4090c.errors import UsageError

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def test_lines_of_tokens_and_of_images_are_told_with_their_own_unit() -> None:
    tokens = json.loads((GOLDEN / "metrics.jsonl").read_text().splitlines()[0])
    images = json.loads((GOLDEN / "metrics-images.jsonl").read_text())
    assert told_in(tokens) == "loss 5.5947  741 tokens/s"
    assert told_in(images) == "loss 5.5000  1,024 images/s"
    assert told_in({**tokens, "eval_loss": 3.25}) == "loss 5.5947  741 tokens/s  eval_loss 3.2500"
    assert told_in({"anything": 1}) == ""


def test_a_script_of_the_users_own_is_not_profiled() -> None:
    with pytest.raises(UsageError, match=r"mine.py is a script of your own"):
        command.main(["mine.py", "--profile"], standalone_mode=False)
