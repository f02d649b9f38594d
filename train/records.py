"""A record of the input -> the text to be encoded, with stand-ins for control tokens and marks where the loss counts.

Records: {"text": …} · {"instruction": …, "input": …, "output": …} · {"messages": [{"role", "content"}, …]}, also spelled
{"conversations": [{"from", "value"}, …]}. Further keys are not read. Prompts do not count toward the loss, responses do, and
so does the token that ends a response's turn.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from train.errors import Stop
from train.tokens import BYTES, CLOSE, OPEN, PROMPT, RESPONSE, Tokens, stand_in

LITERAL, BEGIN, FINISH = "\ufdd2", "\ufdd3", "\ufdd4"
"""While a template is filled in: "<|im_end|>" in a user's text becomes LITERAL id CLOSE; around a response's content."""
_BOUNDS = re.compile(f"([{BEGIN}{FINISH}])")
_RESERVED = re.compile(f"[{OPEN}-{FINISH}]")

DEFAULT = "default"
"""The template of tokenizers without one: "### Instruction:" and "### Response:" on lines of their own, responses end in eos."""

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatgpt": "assistant"}
"""Names of roles in {"conversations": …}, where they differ."""

_ASKED = ("instruction", "prompt", "question", "query", "input", "user")
_ANSWERED = ("output", "completion", "response", "answer", "target", "assistant")
_CONTEXT, _PLAIN = ("input", "context"), ("content", "document", "article", "body", "code")
"""Keys of other people's records, as data sets have them, for which a remedy can be guessed."""

Messages = list[dict[str, str]]


class Bad(ValueError):
    """A record that cannot be used; the text says why."""


@dataclass(frozen=True)
class Record:
    """One record: `messages` for a chat or an instruction, else `text`."""

    kind: str
    text: str = ""
    messages: tuple[dict[str, str], ...] = ()


def parse(line: bytes) -> Record:
    """Return the record in one line of JSON. Raises Bad."""
    try:
        found = json.loads(line.decode())  # of bytes json also takes UTF-16 for what it looks like
    except UnicodeDecodeError as error:
        raise Bad(f"not UTF-8: {error.reason} at byte {error.start + 1} of the line") from None
    except (ValueError, RecursionError) as error:
        raise Bad(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Bad(f"a JSON {type(found).__name__}, not an object{_how_to_wrap(found)}")
    if "text" in found:
        return Record("text", check_text("text", found["text"]))
    if "instruction" in found and "output" in found:
        instruction, more = check_text("instruction", found["instruction"]), found.get("input") or ""
        asked = f"{instruction}\n\n{check_text('input', more)}" if more else instruction
        answer = check_text("output", found["output"])
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        if system := found.get("system"):
            messages.insert(0, {"role": "system", "content": check_text("system", system)})
        return Record("instruction", messages=tuple(messages))
    for key, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
        if key in found:
            if not isinstance(found[key], list):
                raise Bad(f"{key} is no list")
            return Record("chat", messages=tuple(_message(found[key], index, role, content) for index in range(len(found[key]))))
    keys = ", ".join(map(str, found))[:80] or "none"
    raise Bad(f"has none of text, instruction with output, messages; its keys: {keys}{_how_to_rename(found)}")


def _how_to_wrap(found: Any) -> str:
    """Return how a line of JSON that is no object becomes a record."""
    if isinstance(found, list) and found and all(isinstance(one, dict) and {"role", "from"} & set(one) for one in found):
        return f"; jq -c '{{{'messages' if 'role' in found[0] else 'conversations'}: .}}' FILE > RECORDS.jsonl"
    if isinstance(found, str):
        return "; jq -c '{text: .}' FILE > RECORDS.jsonl"
    return ""


def _how_to_rename(found: dict[str, Any]) -> str:
    """Return how the keys of a record become those that are read, as far as one can guess."""
    listed = next((key for key, value in found.items() if isinstance(value, list) and value and isinstance(value[0], dict)), None)
    if len(found) == 1 and listed and listed.isascii() and listed.isidentifier():
        return f"; jq -c '.{listed}[]' FILE > RECORDS.jsonl"
    asked, answered, plain = (next((key for key in names if found.get(key)), None) for names in (_ASKED, _ANSWERED, _PLAIN))
    if asked and answered:
        if isinstance(found[asked], list) and isinstance(found[answered], list):
            return f"; jq -c '{{messages: (.{asked} + .{answered})}}' FILE > RECORDS.jsonl"
        context = next((key for key in _CONTEXT if found.get(key) and key != asked), None)
        more = f", input: .{context}" if context else ""
        return f"; jq -c '{{instruction: .{asked}{more}, output: .{answered}}}' FILE > RECORDS.jsonl"
    if plain:
        return f"; jq -c '{{text: .{plain}}}' FILE > RECORDS.jsonl"
    return "; rename them: jq -c '{text: .KEY}' or '{instruction: .KEY, output: .KEY}' FILE > RECORDS.jsonl" if found else ""


def _message(messages: list[Any], index: int, role_key: str, content_key: str) -> dict[str, str]:
    """Return message `index` as {"role", "content"}. Raises Bad."""
    message, where = messages[index], f"message {index + 1}"
    if not isinstance(message, dict) or not isinstance(message.get(role_key), str):
        raise Bad(f"{where} has no {role_key}")
    role = str(message[role_key])
    role = _ROLES.get(role, role)
    content = message.get(content_key)
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise Bad(f"{where} has a part that is no text")
        content = "".join(str(part) for part in parts)
    return {"role": role, "content": check_text(where, content, empty=role != "assistant")}


def check_text(where: str, value: Any, empty: bool = False) -> str:
    """Return `value` when it is a text that can be trained on; it may be blank only with `empty`. Raises Bad."""
    if not isinstance(value, str):
        raise Bad(f"{where} is {'missing' if value is None else f'a {type(value).__name__}'}, not text")
    if not empty and not value.strip():
        raise Bad(f"{where} is empty")
    if not value.isascii():
        if found := _RESERVED.search(value):
            raise Bad(f"{where} holds the noncharacter U+{ord(found[0]):04X}, which no text has")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Bad(f"{where} holds half a surrogate pair, which is no character") from None
    return value


class Writer:
    """Turns records into texts to be encoded, by one tokenizer and one template."""

    def __init__(self, tokens: Tokens, template: str = "auto") -> None:
        """Use the tokenizer's own `template` when "auto" finds one, "default", or the Jinja in the text given. Raises Stop."""
        self.tokens = tokens
        source = tokens.chat_template if template == "auto" else None if template == DEFAULT else template
        self.name = DEFAULT if source is None else "tokenizer" if template == "auto" else "file"
        self.source = source or ""
        self._fill = self._own if source is None else self._by_jinja
        longest_first = sorted(tokens.control, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._turn_end = re.compile(rf"\s*(?:{self._control.pattern})") if tokens.control else re.compile("(?!)")

    def text_of(self, record: Record) -> str:
        """Return what is to be encoded for `record`. Raises Bad."""
        if self.tokens.kind == BYTES:
            contents = [record.text, *(message["content"] for message in record.messages)]
            if any("\0" in content for content in contents):
                raise Bad("holds a zero byte, which ends a text under --tokenizer bytes")
        if record.kind == "text":
            return record.text
        messages = list(record.messages)
        if not any(message["role"] == "assistant" for message in messages):
            raise Bad("no message of the assistant: there is nothing to learn")
        return self._fill(messages)

    def as_jinja(self) -> str:
        """Return the template as transformers fills it in, so that the model is asked in the tokens that it was trained on."""
        if self.source:
            return self.source
        text = {token: text for text, token in self.tokens.control.items()}
        begin, end = "".join(text.get(token, "") for token in self.tokens.begin), text[self.tokens.end]
        response = "### Response:\n" + " " * self.tokens.puts_space_before  # the one that opens the response's own stretch
        return (
            f"{{{{ {begin!r} }}}}{{% for message in messages %}}"
            "{% if message['role'] == 'system' %}{{ message['content'] }}"
            "{% elif message['role'] == 'user' %}{{ '### Instruction:\n' + message['content'] }}"
            f"{{% elif message['role'] == 'assistant' %}}{{{{ {response!r} + message['content'] + {end!r} }}}}"
            "{% else %}{{ raise_exception('no role ' + message['role'] + ', only system, user and assistant') }}{% endif %}"
            "{% if not loop.last %}{{ '\n\n' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '\n\n### Response:\n' }}{% endif %}"
        )

    def _own(self, messages: Messages) -> str:
        """Return `messages` in the default template."""
        end = stand_in(self.tokens.end)
        parts = ["".join(map(stand_in, self.tokens.begin))]
        for message in messages:
            if message["role"] == "system":
                parts.append(f"{message['content']}\n\n")
            elif message["role"] == "user":
                parts.append(f"### Instruction:\n{message['content']}\n\n")
            elif message["role"] == "assistant":
                parts.append(f"### Response:\n{RESPONSE}{message['content']}{end}{PROMPT}\n\n")
            else:
                raise Bad(f"the default template has no role {message['role']!r}, only system, user and assistant")
        return "".join(parts).removesuffix("\n\n")

    def _by_jinja(self, messages: Messages) -> str:
        """Return `messages` in a Jinja template, as transformers fills it in."""
        wrapped = [self._wrap(message) for message in messages]
        count = sum(message["role"] == "assistant" for message in messages)
        filled, begins, finishes = _take_out(self._render(wrapped))
        if len(finishes) != count:
            raise Bad("the chat template leaves out a message of the assistant; or --template default")
        if len(begins) != count:  # it takes the content apart, as Qwen 3's does with <think>
            responses = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            begins = [self._prompt_length(wrapped, index, filled) for index in responses]
        else:
            leads = [_lead(one["content"]) for one in messages if one["role"] == "assistant"]
            begins = [begin - len(lead) * filled.endswith(lead, 0, begin) for begin, lead in zip(begins, leads, strict=True)]
        parts, at = [], 0
        for number, (begin, finish) in enumerate(zip(begins, finishes, strict=True)):
            turn_end = self._turn_end.match(filled, finish)
            finish = turn_end.end() if turn_end else finish
            prompt, response = filled[at:begin], filled[begin:finish]
            if self.tokens.puts_space_before:  # the one between them: the tokenizer puts it before the response again
                prompt, response = (prompt, response[1:]) if response.startswith(" ") else (prompt.removesuffix(" "), response)
            end = "" if turn_end or number < count - 1 else stand_in(self.tokens.end)
            parts += [self._spell(prompt), RESPONSE, self._spell(response), end, PROMPT]
            at = finish
        return "".join(parts) + self._spell(filled[at:])

    def _wrap(self, message: dict[str, str]) -> dict[str, str]:
        """Return `message` with its control texts made literal, and a response's content between BEGIN and FINISH.

        White space stays outside: a template may trim it.
        """
        control = self.tokens.control
        content = self._control.sub(lambda found: f"{LITERAL}{control[found[0]]}{CLOSE}", message["content"])
        if message["role"] == "assistant":
            core, lead = content.strip(), _lead(content)
            content = f"{lead}{BEGIN}{core}{FINISH}{content[len(lead) + len(core) :]}"
        return {"role": message["role"], "content": content}

    def _render(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            (filled,), _ = render_jinja_template(
                [messages], chat_template=self.source, add_generation_prompt=add_generation_prompt, **self.tokens.names
            )
        except ImportError as error:
            remedy = "pip install 'r4090c[train]', or --template default"
            raise Stop("chat template", str(error), "transformers and jinja2 >= 3.1.6", remedy) from None
        except Exception as error:
            raise Bad(f"the chat template refuses it: {' '.join(str(error).split())[:200]}; or --template default") from error
        return str(filled)

    def _prompt_length(self, wrapped: Messages, index: int, filled: str) -> int:
        """Return where the response of message `index` begins in `filled`: after what a model would be given. Raises Bad."""
        prompt, *_ = _take_out(self._render(wrapped[:index], add_generation_prompt=True))
        if not filled.startswith(prompt):
            raise Bad(f"the chat template leaves out a part of message {index + 1}")
        return len(prompt)

    def _spell(self, filled: str) -> str:
        """Return `filled` with the template's control tokens as stand-ins, and the users' as the text they were."""
        spelled = self._control.sub(lambda found: stand_in(self.tokens.control[found[0]]), filled)
        if LITERAL in spelled:
            text = {str(token): text for text, token in self.tokens.control.items()}
            spelled = re.sub(f"{LITERAL}(\\d+){CLOSE}", lambda found: text[found[1]], spelled)
        return spelled


def _lead(content: str) -> str:
    """Return the white space that `content` begins with."""
    return content[: len(content) - len(content.lstrip())]


def _take_out(filled: str) -> tuple[str, list[int], list[int]]:
    """Return `filled` without BEGIN and FINISH, and where each of them stood."""
    places: dict[str, list[int]] = {BEGIN: [], FINISH: []}
    stretches = _BOUNDS.split(filled)
    at = 0
    for stretch, bound in zip(stretches[::2], stretches[1::2], strict=False):
        at += len(stretch)
        places[bound].append(at)
    return "".join(stretches[::2]), places[BEGIN], places[FINISH]
