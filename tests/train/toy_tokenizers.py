"""Small tokenizers of the kinds that models have, made in a second: no download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CORPUS = [
    "The quick brown fox jumps over the lazy dog. She said: hello, how are you today? It's 1234 o'clock.",
    "def add(first, second):\n    return first + second\n\n\nprint(add(1, 2))\n",
    "Übergrößen, naïve façade; 日本語のテキスト и немного русского 🙂🙂\n\n- a list\n- of things\n",
    "### Instruction:\nAnswer.\n\n### Response:\nyes\n user assistant system im_start im_end endoftext INST",
] * 4
CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (  # as Qwen 3's does: reasoning is taken out of the content, and put back for the last turn only
    "{% for message in messages %}{% if message.role == 'assistant' %}{% set content = message.content %}{% set thought = '' %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ content + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)


_OBJECT = {"__type": "AddedToken", "content": "<|endoftext|>"}
"""A token of tokenizer_config.json may be its text or an object."""


def _save(tokenizer: Any, folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    return folder


def chatml(folder: Path, template: str = CHATML, vocab_size: int = 600) -> Path:
    """Byte-level BPE with control tokens, like GPT-2's and Qwen's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=CHATML_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.enable_truncation(8)  # as some are shipped: nobody's data may be cut by it
    return _save(tokenizer, folder, eos_token="<|im_end|>", pad_token=_OBJECT, chat_template=template)


def llama2(folder: Path) -> Path:
    """BPE with byte fallback that puts a space before every stretch of text, and <s> before a text, like Llama 2's."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers

    names = ["<unk>", "<s>", "</s>"]
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    marked = [text.replace(" ", "▁") for text in CORPUS]
    trained.train_from_iterator(
        [piece for text in marked for piece in text.replace("▁", "\0▁").split("\0")],
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=[*names, *(f"<0x{byte:02X}>" for byte in range(256))], show_progress=False
        ),
    )
    described = json.loads(trained.to_str())
    described["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return _save(tokenizer, folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=LLAMA2)


def words(folder: Path) -> Path:
    """Whole words, which no fast engine does, and whose vocabulary has the control token "[EOS]" as a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=["[UNK]", "[EOS]"], show_progress=False))
    return _save(tokenizer, folder, eos_token="[EOS]", unk_token="[UNK]")


def every_class(folder: Path) -> Path:
    """Byte-level BPE that shows for any character whether it counts as a letter: "a" and its first byte are one token then."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    spelled = _byte_names()
    vocabulary = {name: byte for byte, name in spelled.items()}
    merges = [(spelled[ord("a")], spelled[lead]) for lead in range(0xC2, 0xF5)]
    vocabulary |= {first + second: 256 + index for index, (first, second) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return _save(tokenizer, folder, eos_token="<|endoftext|>")


def _byte_names() -> dict[int, str]:
    """Return how byte-level BPE writes each byte: printable ones as they are, the others from U+0100 on (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
