"""The edge of the programs that tell one result: export.py and evaluate.py. Exit codes as train/main.py."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from train.errors import FAILED, Stop
from train.storage import FULL_OR_GONE, refused


def leave_with(work: Callable[[], None], out: Path, *, as_json: bool) -> NoReturn:
    """Do the work, tell in one line (or JSON object) what stopped it, and leave at once; `out`: where it writes."""
    try:
        work()
        code = 0
    except Stop as stop:
        code = _fail(stop, as_json)
    except ImportError as error:
        remedy = f"{sys.executable} -m pip install 'r4090c[train]'"
        missing = Stop(sys.executable, f"cannot import {error.name}: {error}", "the libraries of the training", remedy)
        code = _fail(missing, as_json)
    except KeyboardInterrupt:
        remedy = "start it again when you like: nothing half-made is kept"
        code = _fail(Stop(sys.argv[0], "interrupted (Ctrl-C)", "its end", remedy, 128 + signal.SIGINT), as_json)
    except OSError as error:
        if error.errno in FULL_OR_GONE:
            code = _fail(refused(error, out), as_json)
        else:
            traceback.print_exc()
            code = FAILED
    except BaseException:  # noqa: BLE001  (the edge of the process)
        traceback.print_exc()
        code = FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fail(stop: Stop, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": stop.told, "exit_code": stop.exit_code}), flush=True)
    else:
        print(f"train: {stop}", file=sys.stderr, flush=True)
    return stop.exit_code
