"""Data preparation and loading: python -m bench.data.

Preparation: `r4090c data prepare` against Hugging Face datasets' map and `tokenizers` by hand, on the same JSON lines with the
same tokenizer; all must give the same tokens. Loading: train.data.Samples alone against training `tiny` from the same folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peertools import datasets, default_cache
from bench.processes import end_on_sigterm
from bench.record import (
    REPOSITORY,
    BenchError,
    Goal,
    Record,
    arguments_parser,
    child_environment,
    package_versions,
    positive,
    ratios,
    spread,
    table,
)

OURS, DATASETS, BY_HAND = "r4090c data prepare", "datasets.map", "encode_batch_fast"
END = "<|endoftext|>"
VOCABULARY, TRAINED_MB = 32_000, 20
DOCUMENT_CHARACTERS = (200, 12_000)
"""As in the measurement the goal comes from: pieces of source code and documentation of at most 12,000 characters."""
SPEEDUP, MEMORY_MIB, LOADING = 20, 1024, 20
TIMEOUT_S = 1800
TRAIN_STEPS, SKIPPED_STEPS = 14, 4
LOADED_SEQUENCES = 20_000


@dataclass(frozen=True)
class Setting:
    """What every contender gets."""

    work: Path
    lines: Path
    tokenizer: Path
    size_mb: float


def documents(seed: int = 5) -> Iterator[str]:
    """Yield texts of this Python's library and packages, in a random order. None holds END: the peers make a token of it."""
    roots = [Path(sysconfig.get_path("stdlib")), *(Path(entry) for entry in sys.path if entry.endswith("site-packages"))]
    files = sorted(
        {file for root in roots for ending in ("*.py", "*.md", "*.rst", "*.txt", "*.h") for file in root.rglob(ending)}
    )
    random.Random(seed).shuffle(files)
    for file in files:
        try:
            text = file.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            continue
        for start in range(0, len(text), DOCUMENT_CHARACTERS[1]):
            piece = text[start : start + DOCUMENT_CHARACTERS[1]]
            if len(piece) >= DOCUMENT_CHARACTERS[0] and END not in piece and "\0" not in piece:
                yield piece


def make_setting(work: Path, size_mb: int) -> Setting:
    """Write the input and train the tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    lines, tokenizer = work / "input.jsonl", work / "tokenizer"
    written, taught = 0, list[str]()
    with lines.open("w", encoding="utf-8") as file:
        for text in documents():
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            written += len(text.encode())
            if written < TRAINED_MB * 1e6:
                taught.append(text)
            if written >= size_mb * 1e6:
                break
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        taught,
        trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.mkdir()
    made.save(str(tokenizer / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    return Setting(work, lines, tokenizer, lines.stat().st_size / 1e6)


@dataclass(frozen=True)
class Ran:
    """One process that came to its end, with all that it started."""

    wall_s: float
    peak_mib: float
    problem: str


def run(argv: Sequence[str], environment: Mapping[str, str], folder: Path) -> Ran:
    """Run `argv` in a session of its own; the peak is the sum of the resident memory of that session, looked at every 50 ms."""
    began = time.perf_counter()
    with (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        peak = 0.0
        try:
            while process.poll() is None and time.perf_counter() - began < TIMEOUT_S:
                peak = max(peak, resident_mib(process.pid))
                time.sleep(0.05)
            wall_s = time.perf_counter() - began
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    told = (folder / "stderr").read_text(errors="replace").strip()[-300:]
    return Ran(wall_s, peak, "" if process.returncode == 0 else f"rc {process.returncode}: {told}")


def resident_mib(session: int) -> float:
    """Return the resident memory of all processes of a session; pages they share count for each."""
    pages = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                    pages += int((entry / "statm").read_text().split()[1])
            except (OSError, IndexError):
                continue  # it ended meanwhile
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def tokens_sha256(contender: str, out: Path) -> str:
    """Return the hash of the tokens a contender wrote, the same for the same tokens."""
    content = (out / "tokens.bin").read_bytes() if contender == OURS else memoryview(out.read_bytes())[128:]  # NumPy's header
    return hashlib.sha256(content).hexdigest()


def contenders(setting: Setting, cache: Path, only: Sequence[str]) -> dict[str, Callable[[Path], list[str]]]:
    """Return contender -> command line that writes to the path given."""
    lines, tokenizer, peers = str(setting.lines), str(setting.tokenizer), REPOSITORY / "bench" / "peers"
    known: dict[str, Callable[[Path], list[str]]] = {
        OURS: lambda out: [
            *(sys.executable, "-m", "r4090c", "data", "prepare", lines),
            *("--tokenizer", tokenizer, "--out", str(out)),
        ],
        BY_HAND: lambda out: [sys.executable, str(peers / "encode_batch.py"), lines, tokenizer, str(out)],
    }
    if not only or any(word in DATASETS for word in only):
        python = str(datasets(cache))
        processes = str(len(os.sched_getaffinity(0)))
        script = str(peers / "datasets_map.py")
        known[DATASETS] = lambda out: [python, script, lines, tokenizer, str(out), processes, str(setting.work / "datasets")]
    return {name: argv for name, argv in known.items() if not only or any(word in name for word in only)}


def prepare_once(name: str, argv: Callable[[Path], list[str]], setting: Setting) -> tuple[Ran, str]:
    """Let one contender prepare everything from the start; return how that went and the hash of its tokens."""
    out = setting.work / ("out" if name == OURS else "out.npy")
    for left in (out, setting.work / "datasets"):
        shutil.rmtree(left, ignore_errors=True)
        left.unlink(missing_ok=True)
    ran = run(argv(out), child_environment(PYTHONPATH=str(REPOSITORY), HF_HUB_OFFLINE="1"), setting.work)
    return ran, "" if ran.problem else tokens_sha256(name, out)


def loading_rates(work: Path, lines: Path) -> tuple[float, float]:
    """Return tokens/s of reading alone and of training `tiny`, from the same folder of bytes, a process each."""
    some = work / "some.jsonl"
    with lines.open() as file:
        some.write_text("".join(line for _, line in zip(range(500), file, strict=False)))
    recipe = json.loads((REPOSITORY / "tests" / "golden" / "recipe-tiny.json").read_text())
    length, micro_batch = recipe["data"]["sequence_length"], recipe["micro_batch"]
    environment = child_environment(PYTHONPATH=str(REPOSITORY), R4090C_DEVICE="cpu", CUDA_VISIBLE_DEVICES="")
    shutil.rmtree(work / "run", ignore_errors=True)

    def finish(*argv: str) -> str:
        done = subprocess.run([sys.executable, *argv], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise BenchError(f"{argv[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        return done.stdout

    if not (work / "bytes").exists():
        finish("-m", "r4090c", "data", "prepare", str(some), "--tokenizer", "bytes", "--out", str(work / "bytes"))
    recipe["data"] = {"kind": "prepared", "path": "bytes", "sequence_length": length}
    (work / "recipe.json").write_text(json.dumps(recipe | {"steps": TRAIN_STEPS}))
    folders = ("--run-dir", str(work / "run"), "--data-dir", str(work))
    finish(str(REPOSITORY / "train" / "main.py"), "--recipe", str(work / "recipe.json"), *folders)
    told = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = statistics.median(line["tokens_per_s"] for line in told[SKIPPED_STEPS:])
    loaded = float(finish("-c", LOAD, str(work / "bytes"), str(length), str(micro_batch), str(LOADED_SEQUENCES)))
    return loaded, trained


LOAD = """
import sys, time
from pathlib import Path
from train import data
folder, length, micro_batch, sequences = Path(sys.argv[1]), *map(int, sys.argv[2:])
samples = data.Samples(data.open_prepared(folder, length), length, 1)
samples.batch(0, 1)
began = time.perf_counter()
for first in range(0, sequences, micro_batch):
    samples.batch(first, micro_batch)
print(sequences * length / (time.perf_counter() - began))
"""


def main() -> int:
    """Entry point."""
    parser = arguments_parser(__doc__ or "", rounds=3)
    parser.add_argument("--mb", type=positive, default=200, help="size of the input (default: 200)")
    parser.add_argument("--only", default="", metavar="WORD,…", help="only contenders whose name contains a word")
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="FOLDER", help="where the peers are installed")
    options = parser.parse_args()
    end_on_sigterm()
    only = [word for word in options.only.split(",") if word]
    with tempfile.TemporaryDirectory(prefix="r4090c-bench-data-") as folder:
        try:
            setting = make_setting(Path(folder), options.mb)
            chosen = contenders(setting, options.cache, only)
            versions = package_versions("r4090c", "tokenizers", "gigatoken", "torch", "deepspeed") | {"datasets": "5.2.0"}
            record = Record(options.out, "data", versions=versions, rounds=options.rounds, input_mb=round(setting.size_mb, 1))
            measure(record, chosen, setting, options.rounds)
        except BenchError as error:
            print(f"bench.data: {error}", file=sys.stderr)
            return 2
    return 0


def measure(record: Record, chosen: Mapping[str, Callable[[Path], list[str]]], setting: Setting, rounds: int) -> None:
    """Run all rounds and write the tables."""
    if BY_HAND not in chosen:
        raise BenchError(f"{BY_HAND} is the measure of right tokens: name it too with --only")
    _, right = prepare_once(BY_HAND, chosen[BY_HAND], setting)  # and everything is in the page cache
    for number in range(rounds):
        order = list(chosen)
        random.Random(number).shuffle(order)
        for name in order:
            ran, sha256 = prepare_once(name, chosen[name], setting)
            problem = ran.problem or ("" if sha256 == right else "other tokens than the model's own tokenizer gives")
            rate = setting.size_mb / ran.wall_s
            run_ = {"contender": name, "round": number, "wall_s": round(ran.wall_s, 2), "mb_s": round(rate, 2)}
            record.add({**run_, "peak_mib": round(ran.peak_mib)}, problem)
        loaded, trained = loading_rates(setting.work, setting.lines)
        record.add({"contender": "loading", "round": number, "tokens_s": round(loaded)})
        record.add({"contender": "training", "round": number, "tokens_s": round(trained)})

    def figures(name: str, key: str) -> list[float]:
        return [one[key] for one in record.runs if one["contender"] == name and key in one]

    prepared = [one for one in record.runs if "wall_s" in one]
    faster = {name: ratios(prepared, "wall_s", DATASETS, name) for name in chosen}
    shown = (("wall_s", 1), ("mb_s", 1), ("peak_mib", 0))
    rows = [[name, *(spread(figures(name, key), digits) for key, digits in shown), spread(faster[name], 1)] for name in chosen]
    body = table([f"{setting.size_mb:.0f} MB of JSON lines", "wall s", "MB/s", "peak MiB", f"times as fast as {DATASETS}"], rows)
    loads = [one for one in record.runs if "tokens_s" in one]
    body += "\n" + table(
        ["bytes, sequences of 128, 2 at once", "tokens/s", "/ training"],
        [
            [name, spread(figures(name, "tokens_s"), 0), spread(ratios(loads, "tokens_s", name, "training"), 1)]
            for name in ("loading", "training")
        ],
    )
    body += "\nPeak: resident memory of all processes together, shared pages counted for each.\n"
    slower = ratios(prepared, "wall_s", OURS, DATASETS)
    peaks = figures(OURS, "peak_mib")
    shares = ratios(loads, "tokens_s", "training", "loading")
    goals = [
        Goal(f"preparation: wall s, {OURS} / {DATASETS}", 1 / SPEEDUP, statistics.median(slower) if slower else None),
        Goal(f"preparation: peak MiB of {OURS}", MEMORY_MIB, max(peaks) if peaks else None),
        Goal("tokens/s, training / loading alone", 1 / LOADING, statistics.median(shares) if shares else None),
    ]
    record.finish("Data: preparation and loading", body, goals)


if __name__ == "__main__":
    sys.exit(main())
