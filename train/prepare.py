"""Prepare text for training: `prepare.py INPUT… --tokenizer PATH|bytes --out DIR` writes a folder of token files.

INPUT: files (.jsonl, .ndjson: a record a line, see train/records.py; anything else: plain text, one document) or folders of them.
A process a core encodes blocks of the input; this one writes their tokens in the order of the input, beside DIR, and gives the
folder its name when it is whole. A run that was ended goes on where it was when it is started again.

Exit codes: 0 done · 1 more bad records than --max-bad, or it failed · 2 wrong input · 130 and 143 stopped by a signal.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import stat
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start threads, and we fork
if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # was train/: its data.py would hide other packages' modules

try:
    from train.blocks import BLOCK, JSON_LINES, Found, Piece, Source, Work, cut, encode, first_texts, in_order, sample
    from train.errors import FAILED, WRONG_INPUT, Stop, counted, reason
    from train.records import DEFAULT, Record, Writer
    from train.storage import DATA_SCHEMA, hash_of
    from train.token_files import BAD_RECORDS, Folder, Reasons, document_lengths
    from train.tokens import Tokens, load, use_fast_engine
except ImportError as missing:
    remedy = "pip install 'r4090c[train]' there, or name another with --python"
    print(f"data prepare: {sys.executable}: {missing}; expected numpy and tokenizers; {remedy}", file=sys.stderr)
    sys.exit(2)

TEXTS = (".txt", ".text", ".md")
"""What is taken from a folder besides JSON lines. A file that is named is plain text unless it ends like JSON lines."""
_ROWS = "python3 -c 'import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader(sys.stdin{how})]' < {file} > {out}"
_TABLE = """python3 -c 'import datasets, sys; datasets.Dataset.{how}(sys.argv[1]).to_json(sys.argv[2])' {file} {out}"""
CONVERSIONS = {
    ".csv": _ROWS.replace("{how}", ""),
    ".tsv": _ROWS.replace("{how}", ', delimiter="\\t"'),
    ".parquet": _TABLE.replace("{how}", "from_parquet"),
    ".arrow": _TABLE.replace("{how}", "from_file"),
    ".gz": "gunzip -k {file}",
    ".zst": "zstd -d {file}",
    ".bz2": "bunzip2 -k {file}",
    ".xz": "unxz -k {file}",
    ".zip": "unzip {file}",
    ".tar": "tar -xf {file}",
    ".tgz": "tar -xf {file}",
    ".pdf": "pdftotext {file}",
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save it as .csv, and that as JSON lines"),
    **dict.fromkeys((".docx", ".doc", ".odt", ".rtf", ".epub"), "save it as plain text"),
}
"""Endings of files that would be nonsense as plain text -> the command that makes what can be read of them."""
JSON = ".json"
PEEK_BYTES = 1 << 20
"""est.: of a file's begin and end, to see what it is."""
MAX_WORKERS = 4
"""By default: 4 × 200 MiB at worst stay below 1 GiB, and encode some 250 MB/s."""
MAX_RECORD_MIB = 1024
"""est.: a record of more cannot be worked on in the memory of a machine that has other work."""
TOLD_EVERY_S = 5.0
SHOWN_EXAMPLES, SHOWN_CHARACTERS = 3, 600
PLAIN_NAME = re.compile(r"[A-Za-z][\w.-]*")
"""What YAML takes for a text without quotes."""
SHORTEST, USUAL_LENGTH = 64, 2048
"""est.: the least sequence_length that is proposed, and the one where any will do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; return the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    options = parse_arguments(argv)
    try:
        return run(options)
    except Stop as stop:
        print(f"data prepare: {stop}", file=sys.stderr)
        return stop.exit_code
    except OSError as error:
        where = error.filename or options.out or "standard output"
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            print(f"data prepare: {where}: not a folder; expected one to write in; give another --out", file=sys.stderr)
            return WRONG_INPUT
        print(f"data prepare: {where}: {error.strerror}; expected room and the right to write; df -h {where}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt as stopped:
        number = stopped.args[0] if stopped.args else signal.SIGINT
        print("data prepare: stopped; the same command goes on from here", file=sys.stderr)
        return 128 + int(number)


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)


def run(options: argparse.Namespace) -> int:
    """Prepare, or with --dry-run only count and show; return the exit code."""
    began_s = time.monotonic()
    if not 0 < options.max_record_mib <= MAX_RECORD_MIB:
        raise Stop("--max-record-mib", f"{options.max_record_mib:g}", f"more than 0, at most {MAX_RECORD_MIB}", "correct it")
    if options.workers < 0:
        raise Stop("--workers", f"{options.workers}", "at least 1, or none", "correct it")
    sources, left_out = find_sources(options.inputs)
    if left_out:
        endings = ", ".join(f"{ending} × {many:,}" for ending, many in left_out.most_common(5))
        tell(f"left out {counted(left_out.total(), 'file')} of other endings ({endings}); name them to have them read")
    tokens = load(options.tokenizer, options.eos)
    writer = Writer(tokens, _template(options.template))
    work = Work(sources, writer, int(options.max_record_mib * 2**20), encode=not options.dry_run)
    notice = use_fast_engine(tokens, sample(work))
    if notice:
        tell(notice)
    workers = options.workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    if options.dry_run:
        return dry_run(options, work, workers)
    return prepare(options, work, workers, began_s)


def prepare(options: argparse.Namespace, work: Work, workers: int, began_s: float) -> int:
    """Write the folder --out; return the exit code."""
    out = Path(os.path.abspath(options.out))  # noqa: PTH100 -- `.` and `..` have no name; a link is what it leads to
    plan, blocks = plan_of(options, work), list(cut(work.sources))
    if (out / "manifest.json").exists():
        manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
        if manifest.get("plan_sha256") != hash_of(plan):
            raise Stop(out, "other data lies there", "a new folder", "remove it, or give another --out")
        tell(f"{out} is prepared already: nothing to do")
        say(options, manifest, out)
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Stop(out, "not empty" if out.is_dir() else "a file", "a new folder", "remove it, or give another --out")
    aside = out.parent / f".{out.name}.partial"
    aside.mkdir(exist_ok=True)
    with (aside / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Stop(aside, "another process is preparing this", "one at a time", "wait for it") from None
        folder = Folder(aside, plan, work.writer.tokens.dtype)
        if folder.block:
            tell(f"going on after {folder.block} of {len(blocks)} blocks")
        total = sum(source.size for source in work.sources)
        done = sum(one.end - one.start for block in blocks[: folder.block] for one in block)
        with Progress(total, done) as progress:
            for found in in_order(work, blocks[folder.block :], workers):
                folder.append(found, work.sources)
                progress.show(found.size, folder.tokens, folder.bad)
        folder.journal()
        for line in folder.reasons().lines():
            tell(line)
        if folder.bad > options.max_bad:
            raise _too_many(aside / BAD_RECORDS, options, folder.bad, folder.records.total(), " (what is done is kept)")
        if not folder.documents:
            shutil.rmtree(aside)
            raise Stop(_names(work.sources), "no records", "at least one", "give other input")
        manifest = folder.finish(manifest_of(options, work, folder, plan))
        aside.rename(out)
        (out / "lock").unlink()  # not before: whoever makes another one in `aside` would think it is his
    tell(f"{sum(one.size for one in work.sources) / 1e6:,.1f} MB in {time.monotonic() - began_s:.1f} s, {workers} process(es)")
    say(options, manifest, out)
    return 0


def _too_many(culprit: object, options: argparse.Namespace, bad: int, good: int, kept: str = "") -> Stop:
    """Return what to tell when more records are bad than may be; to leave most of the data out is no remedy."""
    observed = f"{bad:,} of {counted(bad + good, 'record')} {'is' if bad == 1 else 'are'} bad"
    remedy = f"mend them, or leave them out with --max-bad {bad}{kept}" if bad <= good else "mend them: the lines above say how"
    return Stop(culprit, observed, f"at most {options.max_bad} (--max-bad)", remedy, FAILED)


def find_sources(inputs: Sequence[Path]) -> tuple[list[Source], Counter[str]]:
    """Return the files to read, in order, each once, and the endings of what folders hold besides. Raises Stop."""
    paths, left_out, known = dict[Path, None](), Counter[str](), set[tuple[int, int]]()
    for given in inputs:
        if given.is_dir():
            files = sorted(path for path in given.rglob("*") if path.is_file())
            taken = [path for path in files if path.suffix.lower() in JSON_LINES + TEXTS]
            left_out.update(path.suffix.lower() or "none" for path in files if path not in set(taken))
            if not taken:
                convertible = [path for path in files if path.suffix.lower() in (JSON, *CONVERSIONS)]
                if convertible and convertible[0].suffix.lower() == JSON:
                    _look_at(convertible[0], convertible[0].stat().st_size)
                remedy = _conversion(convertible[0]) if convertible else "name others"
                expected = f"files that end in {', '.join(JSON_LINES + TEXTS)}"
                raise Stop(given, "no such file in it", expected, remedy)
            paths.update(dict.fromkeys(taken))
        elif given.suffix.lower() in CONVERSIONS:
            raise Stop(given, f"a {given.suffix} file", "JSON lines (.jsonl) or plain text", _conversion(given))
        else:
            paths[given] = None
    sources = []
    for path in paths:
        try:
            told = path.stat()
            if not stat.S_ISREG(told.st_mode):  # a pipe would be waited for, and has no size to be cut by
                raise Stop(path, "no regular file", "a file of text or of JSON lines", "write it to a file first")
            _look_at(path, told.st_size)
        except OSError as error:
            raise Stop(path, str(error.strerror), "a readable file", "correct the path") from None
        if (told.st_dev, told.st_ino) in known:
            tell(f"{path}: the same file under another name; it is read once")
            continue
        known.add((told.st_dev, told.st_ino))
        sources.append(Source(path.absolute(), told.st_size, told.st_mtime_ns))
    if not any(source.size for source in sources):
        raise Stop(_names(sources), "empty", "at least one record", "give other input")
    return sources, left_out


def _look_at(path: Path, size: int) -> None:
    """Tell when a file seems to be something else than its name says. Raises Stop when it cannot be what is read; OSError."""
    with path.open("rb") as file:
        first = file.readline(PEEK_BYTES).removeprefix(b"\xef\xbb\xbf").strip()
        while not first and file.tell() < min(size, PEEK_BYTES):
            first = file.readline(PEEK_BYTES).strip()
        more = file.tell() < size
        file.seek(max(0, size - PEEK_BYTES))
        last = file.read(PEEK_BYTES).rstrip()[-1:]
    whole = _parsed(first)
    lines = path.suffix.lower() in JSON_LINES
    if path.suffix.lower() == JSON or lines:
        if first[:1] + last == b"[]" and (not more or whole is None):
            raise Stop(path, "one JSON list", "a record a line", _by_jq(path, ".[]"))
        over_lines = first == b"{" if lines else whole is None and first[:1] == b"{"  # a torn first record is a bad one
        if over_lines and last == b"}" and more:
            remedy = f"{_by_jq(path, '.')}, or '.KEY[]' where the records are a list below a key"
            raise Stop(path, "JSON over several lines", "a record a line", remedy)
        if not lines:
            is_lines = isinstance(whole, dict)
            observed = "JSON lines by another name" if is_lines else "no JSON lines"
            remedy = f"mv {shlex.quote(str(path))} {_beside(path)}" if is_lines else "correct it"
            raise Stop(path, observed, f"a record a line, in a file that ends in {JSON_LINES[0]}", remedy)
    elif isinstance(whole, dict):
        tell(f"{path}: taken as plain text, though it begins like JSON lines; those end in {', '.join(JSON_LINES)}")


def _parsed(line: bytes) -> Any:
    """Return what JSON `line` is, None where it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _conversion(path: Path) -> str:
    """Return the command that makes something that can be read of a file with an ending of CONVERSIONS."""
    return CONVERSIONS[path.suffix.lower()].format(file=shlex.quote(str(path)), out=_beside(path))


def _by_jq(path: Path, what: str) -> str:
    return f"jq -c {shlex.quote(what)} {shlex.quote(str(path))} > {_beside(path)}"


def _beside(path: Path) -> str:
    """Return the name of a file of JSON lines to be made of `path`, for a shell."""
    name = f"{path.stem}{JSON_LINES[0]}"
    return shlex.quote(str(path.with_name(name if name != path.name else f"{path.stem}.records{JSON_LINES[0]}")))


def plan_of(options: argparse.Namespace, work: Work) -> dict[str, Any]:
    """Return everything that the tokens depend on: a run goes on only with the same."""
    writer = work.writer
    return {
        "schema": DATA_SCHEMA,
        "sources": [[str(one.path), one.size, one.modified_ns] for one in work.sources],
        "tokenizer": writer.tokens.sha256,
        "end": writer.tokens.end,
        "begin": list(writer.tokens.begin),
        "template": hashlib.sha256(writer.source.encode()).hexdigest() if writer.source else writer.name,
        "packing": options.packing,
        "max_record": work.max_record,
        "block": BLOCK,
    }


def manifest_of(options: argparse.Namespace, work: Work, folder: Folder, plan: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest, but for the files."""
    tokens = work.writer.tokens
    packing = options.packing if options.packing != "auto" else "whole" if folder.masked else "stream"
    return {
        "schema": DATA_SCHEMA,
        "tokens": folder.tokens,
        "documents": folder.documents,
        "dtype": tokens.dtype,
        "vocab_size": tokens.vocab_size,
        "largest_token": folder.largest,
        "tokenizer": {
            "kind": tokens.kind,
            "name": tokens.name,
            "sha256": tokens.sha256,
            "bos": tokens.begin[0] if tokens.begin else None,
            "eos": tokens.end,
        },
        "template": work.writer.name,
        **({"chat_template": work.writer.as_jinja()} if +folder.records - Counter(text=folder.records["text"]) else {}),
        "packing": packing,
        "sources": [{"name": str(one.path), "bytes": one.size} for one in work.sources],
        "records": dict(sorted((+folder.records).items())),
        "bad_records": folder.bad,
        "plan_sha256": hash_of(plan),
    }


def dry_run(options: argparse.Namespace, work: Work, workers: int) -> int:
    """Count the records and show the first ones as the model will see them; write nothing. Return the exit code."""
    records, bad, reasons = Counter[str](), 0, Reasons()
    lines = dict[int, int]()
    blocks, writer = list(cut(work.sources)), work.writer
    with Progress(sum(source.size for source in work.sources), 0) as progress:
        for found in in_order(work, blocks, workers):
            for source, line, why in found.bad:
                reasons.add(str(work.sources[source].path), lines.get(source, 0) + line, why)
            bad += len(found.bad)
            lines = {source: lines.get(source, 0) + many for source, many in found.lines}
            records.update(found.records)
            progress.show(found.size, 0, bad)
    parts = [part for block in blocks for part in block]
    examples = [example(writer.tokens, record, text) for record, text in first_texts(work, parts, SHOWN_EXAMPLES)]
    if options.json:
        told = {"records": dict(+records), "bad_records": bad, "bad": list(reasons.lines())}
        print(json.dumps({**told, "tokenizer": writer.tokens.name, "template": writer.name, "examples": examples}))
    else:
        for told_reason in reasons.lines():
            tell(told_reason)
        print(f"records  {', '.join(f'{many:,} {kind}' for kind, many in sorted((+records).items())) or 'none'}; bad: {bad:,}")
        print(f"template {writer.name}, tokenizer {writer.tokens.name} ({writer.tokens.vocab_size:,} tokens)")
        for one in examples:
            print(f"\n--- {one['kind']}, {len(one['ids'])} tokens, {sum(one['loss'])} count toward the loss: between ⟦ and ⟧")
            print(one["text"][:SHOWN_CHARACTERS])
    if not examples:
        remedy = "mend them: the lines above say how" if bad else "give other input"
        raise Stop(_names(work.sources), "no good record", "at least one", remedy)
    if bad > options.max_bad:
        raise _too_many(_names(work.sources), options, bad, records.total())
    return 0


def example(tokens: Tokens, record: Record, text: str) -> dict[str, Any]:
    """Return one record as it will be trained on: ids, loss, and the decoded text with the loss visible."""
    found = Found()
    encode(tokens, [Piece(0, 1, text, record.kind, True, True)], found)
    ids = found.ids.tolist()
    loss = [1] * len(ids) if found.loss is None else found.loss.tolist()
    shown, begin = "", 0
    for index in range(1, len(ids) + 1):
        if index == len(ids) or loss[index] != loss[begin]:
            stretch = tokens.decode(ids[begin:index])
            shown += f"⟦{stretch}⟧" if loss[begin] else stretch
            begin = index
    return {"kind": record.kind, "ids": ids, "loss": loss, "text": shown}


class Progress:
    """How far it is, on stderr: a bar on a terminal, else a line every few seconds."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done, self.begun, self.began_s = total, done, done, time.monotonic()
        self.told_s, self.bar = self.began_s, _bar(total, done)

    def __enter__(self) -> Progress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def show(self, size: int, tokens: int, bad: int) -> None:
        """Say that `size` more bytes are done, with so many tokens and bad records in all."""
        self.done += size
        now_s = time.monotonic()
        rate = (self.done - self.begun) / max(now_s - self.began_s, 1e-6)
        told = f"{tokens:,} tokens" + (f", {counted(bad, 'bad record')}" if bad else "")
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=self.done, told=told)
            self.bar.refresh()
        elif now_s - self.told_s > TOLD_EVERY_S:
            self.told_s = now_s
            left_s = (self.total - self.done) / max(rate, 1)
            tell(f"{self.done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s, {told}, {left_s:.0f} s left")


def _bar(total: int, done: int) -> Any:
    """Return rich's progress bar, None where there is no terminal or no rich. Its thread would not survive our forks: none."""
    if not sys.stderr.isatty():
        return None
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn(), progress.TimeRemainingColumn())
    told = progress.TextColumn("{task.fields[told]}")
    bar = progress.Progress(*columns, told, console=Console(stderr=True), auto_refresh=False)
    bar.add_task("prepare", total=total, completed=done, told="")
    return bar


def tell(text: str) -> None:
    """Say something to a person, on stderr."""
    print(text, file=sys.stderr, flush=True)


def say(options: argparse.Namespace, manifest: dict[str, Any], out: Path) -> None:
    """Print what was prepared on stdout."""
    lengths = document_lengths(out)
    if options.json:
        told = {key: value for key, value in manifest.items() if key not in ("sources", "plan_sha256", "chat_template")}
        print(json.dumps({"folder": str(out), **told, "document_tokens": lengths}, ensure_ascii=False))
        return
    records = ", ".join(f"{many:,} {kind}" for kind, many in manifest["records"].items())
    bad, name = manifest["bad_records"], manifest["tokenizer"]["name"]
    print(f"{manifest['tokens']:,} tokens in {counted(manifest['documents'], 'document')} ({records}; {bad:,} bad)")
    parts = ", ".join(f"{part} % have at most {lengths[f'p{part}']:,}" for part in (50, 90, 99))
    print(f"document lengths: {parts}, the longest {lengths['longest']:,} tokens")
    print(f"tokenizer {name}, {manifest['dtype']}, template {manifest['template']}, packing {manifest['packing']}")
    print(f"sha256 {manifest['sha256'][:12]}, {out}")
    name = out.name if PLAIN_NAME.fullmatch(out.name) else json.dumps(out.name, ensure_ascii=False)
    if manifest["packing"] == "whole":
        length, why = max(SHORTEST, 1 << (lengths["p99"] - 1).bit_length()), "99 % of the documents fit"
    else:
        length, why = min(USUAL_LENGTH, 1 << (manifest["tokens"].bit_length() - 1)), "documents run on across sequences"
    print(f"in a recipe, once {out.name} lies in <paths.shared>/r4090c/data ({why}):")
    print(f"  data: {{kind: prepared, path: {name}, sequence_length: {length}}}")


def _names(sources: Sequence[Source]) -> str:
    """Return the names of the input, for an error."""
    return f"{sources[0].path}" + (f" and {len(sources) - 1} more" if len(sources) > 1 else "")


def _template(wanted: str) -> str:
    """Return "auto", "default", or the text of the template's file. Raises Stop."""
    if wanted in ("auto", DEFAULT):
        return wanted
    try:
        return Path(wanted).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        expected = "auto, default, or a file with a Jinja template"
        raise Stop(f"--template {wanted}", reason(error), expected, "correct --template") from None


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="data prepare", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("inputs", nargs="+", type=Path, metavar="INPUT")
    parser.add_argument("--tokenizer", required=True, metavar="PATH|bytes")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--template", default="auto", metavar="auto|default|FILE")
    parser.add_argument("--packing", default="auto", choices=("auto", "stream", "whole"))
    parser.add_argument("--eos", metavar="TOKEN")
    parser.add_argument("--max-bad", type=int, default=0, metavar="N")
    parser.add_argument("--max-record-mib", type=float, default=16.0, metavar="MIB")
    parser.add_argument("--workers", type=int, default=0, metavar="N")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
