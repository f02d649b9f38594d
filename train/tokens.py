"""A tokenizer by path, or `bytes`: fast, the same ids as the model's own, and no text of a user becomes a control token.

In a copy of the tokenizer every control token ("<|im_end|>", `special` in tokenizer.json) is spelled with a stand-in of
noncharacters, which text does not contain. What is to be encoded says where control tokens stand by these stand-ins;
"<|im_end|>" in a user's text is encoded like any other text. Two more stand-ins say where the loss begins and ends to count.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from train.errors import Stop, reason

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Around a stand-in. U+FDD0 … U+FDEF are noncharacters: never part of text that is exchanged (Unicode 17, section 23.7)."""
RESPONSE, PROMPT = f"{OPEN}response{CLOSE}", f"{OPEN}prompt{CLOSE}"
"""From here on tokens count toward the loss; from here on they do not."""

Encoded = tuple[Any, Any]
"""(ids of all texts one after the other: uint32, how many each text has: int64)."""
Engine = Callable[[Sequence[str]], Encoded]

BYTES = "bytes"
BYTE_END, BYTE_RESPONSE, BYTE_PROMPT = 0, 255, 254
"""Under `bytes`: text has no zero byte, and UTF-8 never has the other two."""
EXPECTED = "`bytes`, a tokenizer.json, or the folder of a model"
CACHE_BYTES = 48 << 20
"""Measured: 210 MB of source code fill 40 MiB of it, random words as much as there are."""
NAME_OF_HUB = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
"""What may be a model's name on the Hub, and no path that somebody means: OWNER/NAME, or NAME alone."""
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>")
"""Where a tokenizer.json has no tokenizer_config.json beside it to tell its end-of-text token."""


def stand_in(token: int) -> str:
    """Return what stands for control token `token` in a text to be encoded."""
    return f"{OPEN}{token}{CLOSE}"


@dataclass
class Tokens:
    """A loaded tokenizer. `control`: text -> id of the tokens that only a template may write; `begin` opens a plain text."""

    kind: str
    name: str
    sha256: str
    vocab_size: int
    control: dict[str, int]
    begin: tuple[int, ...]
    end: int
    names: dict[str, str]
    """bos_token, eos_token … as a chat template asks for them."""
    chat_template: str | None
    response_mark: int
    prompt_mark: int
    own: Engine
    decode: Callable[[Sequence[int]], str]
    fast: Engine | None = None
    spelled: str = ""
    """tokenizer.json with the stand-ins in it."""
    puts_space_before: bool = False
    """True for a tokenizer that begins every stretch of text with a space (Llama 2)."""
    is_control: Any = field(init=False)

    def __post_init__(self) -> None:
        self.is_control = np.zeros(max(self.vocab_size, self.response_mark + 1, self.prompt_mark + 1), bool)
        self.is_control[list(self.control.values())] = True

    @property
    def dtype(self) -> str:
        """The smallest type that holds every id."""
        return "uint8" if self.vocab_size <= 2**8 else "uint16" if self.vocab_size <= 2**16 else "uint32"

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of `texts`, stand-ins as control tokens and marks.

        A text with a character newer than our Unicode tables goes to the model's own tokenizer: there the tables of two libraries
        differ (measured over all code points, gigatoken 0.10 against tokenizers 0.23: only at those of Unicode 17).
        """
        if self.fast is None:
            return self.own(texts)
        ids, lengths = self.fast(texts)
        new = _with_new_characters(texts)
        if new:
            own_ids, own_lengths = self.own([texts[index] for index in new])
            rows = np.split(ids, np.cumsum(lengths)[:-1])
            for index, row in zip(new, np.split(own_ids, np.cumsum(own_lengths)[:-1]), strict=True):
                rows[index] = row
            ids, lengths = np.concatenate(rows), np.array([len(row) for row in rows])
        return ids, lengths


def load(wanted: str, end: str | None = None) -> Tokens:
    """Return the tokenizer `wanted`: "bytes", a tokenizer.json, or a folder as transformers saves a model. Raises Stop.

    `end` is the text of the token that ends a document, where the folder does not tell or is wrong.
    """
    if wanted == BYTES:
        return _bytes()
    path = Path(wanted)
    content, config = _read(path)
    try:
        described = json.loads(content)
        control = {str(token["content"]): int(token["id"]) for token in described["added_tokens"] if token["special"]}
        return _library(path, content, described, control, config, end)
    except (KeyError, TypeError, ValueError) as error:
        raise Stop(path, f"not a tokenizer.json: {error!r}", "one that `tokenizers` can load", "download it again") from error


def use_fast_engine(tokens: Tokens, sample: Sequence[str]) -> str:
    """Let `tokens` encode with gigatoken when it gives the ids of the model's own tokenizer on `sample`; return a notice, or "".

    `sample` is of the very data that is to be encoded, with its stand-ins.
    """
    if tokens.kind == BYTES:
        return ""
    try:
        import gigatoken
    except ImportError:
        return "gigatoken is not installed: the model's own tokenizer works alone, some 20 times slower (pip install gigatoken)"
    try:
        fast = _gigatoken(gigatoken, tokens)
        (own_ids, own_lengths), (fast_ids, fast_lengths) = tokens.own(sample), fast(sample)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 -- a panic in Rust is no Exception
        return f"gigatoken cannot do this tokenizer ({type(error).__name__}: {error!s:.100}): slower, the model's own is used"
    if not np.array_equal(own_lengths, fast_lengths) or not np.array_equal(own_ids, fast_ids):
        tokens_differ = f"{len(own_ids):,} tokens there, {len(fast_ids):,} here"
        return f"gigatoken's ids differ from the model's own on a sample ({tokens_differ}): slower, the model's own is used"
    tokens.fast = fast
    new_characters()  # made before the fork: once, not in every worker
    return ""


def _bytes() -> Tokens:
    def encode(texts: Sequence[str]) -> Encoded:
        parts = [text.encode() for text in texts]
        for spelled, byte in ((RESPONSE, BYTE_RESPONSE), (PROMPT, BYTE_PROMPT), (stand_in(BYTE_END), BYTE_END)):
            parts = [part.replace(spelled.encode(), bytes([byte])) for part in parts]
        ids = np.frombuffer(b"".join(parts), np.uint8).astype(np.uint32)
        return ids, np.array([len(part) for part in parts], np.int64)

    return Tokens(
        kind=BYTES,
        name=BYTES,
        sha256=hashlib.sha256(BYTES.encode()).hexdigest(),
        vocab_size=256,
        control={"\0": BYTE_END},
        begin=(),
        end=BYTE_END,
        names={"bos_token": "", "eos_token": "\0"},
        chat_template=None,
        response_mark=BYTE_RESPONSE,
        prompt_mark=BYTE_PROMPT,
        own=encode,
        decode=lambda ids: bytes(ids).decode(errors="replace"),
    )


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of tokenizer.json and what lies beside it: tokenizer_config.json, with the chat template."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = _converted(path) if path.is_dir() and not file.exists() else file.read_text(encoding="utf-8")
        beside = file.with_name("tokenizer_config.json")
        config = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}
        template = file.with_name("chat_template.jinja")
        if template.exists():
            config["chat_template"] = template.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _not_here(path) from None
    except (OSError, ValueError) as error:
        raise Stop(file, reason(error), EXPECTED, "correct --tokenizer") from None
    return content, config


def _not_here(path: Path) -> Stop:
    """Return what to tell of a tokenizer that is not on this machine."""
    in_a_folder = path.parent != Path() and path.parent.is_dir()  # then a folder's name was misspelled
    if not NAME_OF_HUB.fullmatch(str(path)) or path.suffix == ".json" or in_a_folder:
        return Stop(path, "no such file or folder", EXPECTED, "correct --tokenizer")
    fetch = f"hf download {path} --local-dir {path.name}, then --tokenizer {path.name}"
    return Stop(path, "not a folder here; names of the Hub are not fetched", EXPECTED, fetch)


def _converted(path: Path) -> str:
    """Return the tokenizer.json of a folder that has only the older format (tokenizer.model). Raises Stop."""
    try:
        from transformers import AutoTokenizer

        return str(AutoTokenizer.from_pretrained(str(path), local_files_only=True).backend_tokenizer.to_str())
    except Exception as error:
        observed = f"no tokenizer.json, and transformers cannot make one: {error}"
        raise Stop(path, observed, EXPECTED, "correct --tokenizer") from error


def _library(
    path: Path, content: str, described: dict[str, Any], control: dict[str, int], config: dict[str, Any], end: str | None
) -> Tokens:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # we start a process a core, and fork after this
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise Stop(path, f"{error}", "the library tokenizers", "pip install 'r4090c[train]', or --python") from None
    try:
        plain = Tokenizer.from_str(content)
        vocab_size = 1 + max(plain.get_vocab(with_added_tokens=True).values())
        spelled = _spelled(described, control, vocab_size)
        own = _tokenizers_engine(Tokenizer.from_str(spelled), control, vocab_size)
    except Exception as error:
        raise Stop(path, f"{error}", "a tokenizer.json that `tokenizers` can load", "download it again") from error
    names = {key: text for key in ("bos_token", "eos_token", "unk_token", "pad_token") if (text := _text(config.get(key)))}
    end_text = end or names.get("eos_token") or next((text for text in USUAL_ENDS if text in control), "")
    if end_text not in control:
        observed = f"its end-of-text token is {end_text!r}" if end_text else "it does not tell which token ends a text"
        expected = "one of its control tokens: " + ", ".join(sorted(control)[:8])
        raise Stop(path, observed, expected, "name it with --eos TOKEN")
    names["eos_token"] = end_text
    unknown = names.get("unk_token") or _text(described["model"].get("unk_token"))
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((one["template"] for one in template if one["name"] == "default"), None)
    after_mark = own([RESPONSE + "a"])[0][1:2]
    return Tokens(
        kind="hf",
        name=path.name if path.is_dir() else f"{path.absolute().parent.name}/{path.name}",
        sha256=hashlib.sha256(content.encode()).hexdigest(),
        vocab_size=vocab_size,
        control={text: token for text, token in control.items() if text != unknown},  # text may well be unknown
        begin=_begin(plain, config, control),
        end=control[end_text],
        names=names,
        chat_template=template,
        response_mark=vocab_size,
        prompt_mark=vocab_size + 1,
        own=own,
        decode=lambda ids: str(plain.decode(list(ids), skip_special_tokens=False)),
        spelled=spelled,
        puts_space_before=any(str(plain.id_to_token(int(token))).startswith("▁") for token in after_mark),
    )


def _begin(plain: Any, config: dict[str, Any], control: dict[str, int]) -> tuple[int, ...]:
    """Return what the tokenizer puts before a text: as tokenizer_config.json says, else as its post-processor does."""
    if "add_bos_token" in config:
        first = control.get(_text(config.get("bos_token")))
        return (first,) if config["add_bos_token"] and first is not None else ()
    bare, whole = (plain.encode("a", add_special_tokens=added).ids for added in (False, True))
    return tuple(whole[: whole.index(bare[0])]) if bare and bare[0] in whole else ()


def _spelled(described: dict[str, Any], control: dict[str, int], vocab_size: int) -> str:
    """Return tokenizer.json with stand-ins for control tokens and both marks as further tokens; nothing is cut or padded."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [
        {**token, "content": stand_in(token["id"]), "normalized": False} if token["content"] in control else token
        for token in described["added_tokens"]
    ]
    marks = [{"id": vocab_size, "content": RESPONSE, **plain}, {"id": vocab_size + 1, "content": PROMPT, **plain}]
    return json.dumps({**described, "added_tokens": added + marks, "truncation": None, "padding": None})


def _tokenizers_engine(spelled: Any, control: dict[str, int], vocab_size: int) -> Engine:
    """Return the engine that is right by definition. `tokenizers` gives stand-ins ids of its own: they are translated."""
    table = np.arange(1 + max(spelled.get_vocab(with_added_tokens=True).values()), dtype=np.uint32)
    for token in control.values():
        table[spelled.token_to_id(stand_in(token))] = token
    table[spelled.token_to_id(RESPONSE)], table[spelled.token_to_id(PROMPT)] = vocab_size, vocab_size + 1

    def encode(texts: Sequence[str]) -> Encoded:
        rows = [encoding.ids for encoding in spelled.encode_batch_fast(list(texts), add_special_tokens=False)]
        lengths = np.array([len(row) for row in rows], np.int64)
        ids = np.fromiter((token for row in rows for token in row), np.uint32, count=int(lengths.sum()))
        return table[ids], lengths

    return encode


def _gigatoken(gigatoken: Any, tokens: Tokens) -> Engine:
    """Return gigatoken's engine. It works in the calling thread: there is a process for every core already.

    It remembers every word it has seen, for ever: once that is CACHE_BYTES it is made anew.
    """
    tokenizer = gigatoken.Tokenizer.from_json(tokens.spelled)
    allowed: dict[int, int] = {}  # by process: the workers are forks

    def encode(texts: Sequence[str]) -> Encoded:
        nonlocal tokenizer
        if not texts:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        if _resident_bytes() > allowed.setdefault(os.getpid(), _resident_bytes() + CACHE_BYTES):
            tokenizer = gigatoken.Tokenizer.from_json(tokens.spelled)
            allowed[os.getpid()] = max(allowed[os.getpid()], _resident_bytes() + CACHE_BYTES // 2)
        rows = [tokenizer.encode(text) for text in texts]  # its encode_batch is no faster, and imports awkward: 0.2 s
        return np.concatenate(rows), np.array([len(row) for row in rows], np.int64)

    return encode


def _resident_bytes() -> int:
    """Return how much memory this process has now (proc(5): the second field of statm counts pages)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _text(value: Any) -> str:
    """Return a token's text: tokenizer_config.json has it bare, or as an object."""
    return str(value.get("content", "")) if isinstance(value, dict) else value if isinstance(value, str) else ""


def _with_new_characters(texts: Sequence[str]) -> list[int]:
    """Return the indices of texts with a character that this Python's Unicode tables do not know."""
    others = [(index, text) for index, text in enumerate(texts) if not text.isascii()]
    table = new_characters()

    def any_new(text: str) -> bool:
        return bool(table[np.frombuffer(text.encode("utf-32-le"), np.uint32)].any())

    return [index for index, text in others if any_new(text)] if any_new("".join(text for _, text in others)) else []


@cache
def new_characters() -> Any:
    """Return a table over all code points: True where this Python's Unicode tables know none."""
    table: Any = np.ones(0x110000, bool)
    for plane in (range(0x40000), range(0xE0000, 0x110000)):  # no others have characters
        table[plane.start : plane.stop] = [unicodedata.category(chr(code)) == "Cn" for code in plane]
    table[0xFDD0:0xFDF0] = False  # our stand-ins
    return table
