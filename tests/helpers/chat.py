"""Small tokenizers with chat templates of the usual kinds, and what each template writes, told by hand.

Without merges a byte is a token, so that ids follow from the text alone; a test that needs merges names them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from llmtrain.data.kinds import RowKind
from llmtrain.data.prepare import pools
from llmtrain.data.prepare.worker import encoder_of, process_unit
from llmtrain.data.row import Row

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
QWEN3 = (
    "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.asked %}"
    "<think>\n{{ m.reasoning_content | default('') }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def workers_here() -> contextlib.AbstractContextManager[object]:
    """`llmtrain prepare` without processes for its workers, which import transformers for two seconds each; templates
    are rendered in theirs."""

    def run_units(todo: Any, settings: Any, places: Any, under_way: Any, keep: Any) -> None:
        encoder = encoder_of(Path(settings.here) / "tokenizer", settings)
        for unit in todo:
            keep(unit, process_unit(unit, settings, encoder, lambda size: None))

    return patch.object(pools, "run_units", run_units)


class RowMaker:
    """A kind of row with its encoder, as a worker of `llmtrain prepare` has it."""

    def __init__(self, folder: Path, format: str = "chat", **options: Any) -> None:
        """`folder`: with the tokenizer. `options`: of the kind."""
        self.folder, self.kind = folder, RowKind.of(format, **options)
        self.encoder = self.kind.encoder(folder, np.dtype("<u2"), bare=False)

    def rows(self, text: str) -> list[Row]:
        """Raises RefusedError."""
        return self.kind.encode(self.encoder, self.encoder.record(text))


class C(str):
    """A control token; any other string is text, whatever it spells."""


Segments = list[tuple[str, bool]]
"""What a row says, in order, and whether it is counted."""


def _chatml(messages: list[dict[str, str]]) -> list[Segments]:
    row: Segments = []
    for m in messages:
        counted = m["role"] == "assistant"
        row += [(C("<|im_start|>"), False), (m["role"] + "\n", False), (m["content"], counted)]
        row += [(C("<|im_end|>"), counted), ("\n", False)]
    return [row[:-1]]


def _llama3(messages: list[dict[str, str]]) -> list[Segments]:
    row: Segments = [(C("<bos>"), False)]
    for m in messages:
        counted = m["role"] == "assistant"
        row += [(C("<|start_header_id|>"), False), (m["role"], False), (C("<|end_header_id|>"), False), ("\n\n", False)]
        row += [(m["content"].strip(), counted), (C("<|eot_id|>"), counted)]
    return [row]


def _gemma(messages: list[dict[str, str]]) -> list[Segments]:
    row: Segments = [(C("<bos>"), False)]
    for m in messages:
        counted = m["role"] == "assistant"
        row += [(C("<start_of_turn>"), False), ("model\n" if counted else "user\n", False)]
        row += [(m["content"].strip(), counted), (C("<end_of_turn>"), counted), ("\n", False)]
    return [row[:-1]]


def _qwen3(messages: list[dict[str, str]]) -> list[Segments]:
    rows: list[Segments] = []
    earlier: Segments = []
    for m in messages:
        head: Segments = [(C("<|im_start|>"), False), (m["role"] + "\n", False)]
        said: Segments = [(m["content"], False), (C("<|im_end|>"), False)]
        if m["role"] == "assistant":
            thoughts = m.get("reasoning_content", "")
            answer = [C("<think>"), f"\n{thoughts}\n", C("</think>"), "\n\n" + m["content"], C("<|im_end|>")]
            rows.append([*earlier, *head, *((part, True) for part in answer)])
        earlier = [*earlier, *head, *said, ("\n", False)]
    return rows


@dataclass(frozen=True)
class Kind:
    """A family of chat models."""

    template: str
    special: tuple[str, ...]
    eos: str
    stop: str
    rows: Callable[[list[dict[str, str]]], list[Segments]]
    bos: str | None = None
    added: tuple[str, ...] = ()
    """Tokens that are added, but not special."""
    system: bool = True


KINDS = {
    "chatml": Kind(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>", _chatml,
                   added=("<tool_call>", "</tool_call>")),
    "generation": Kind(GENERATION, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>", _chatml),
    "llama3": Kind(LLAMA3, ("<bos>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end|>"), "<|end|>",
                   "<|eot_id|>", _llama3, bos="<bos>"),
    "gemma": Kind(GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<end_of_turn>", _gemma,
                  bos="<bos>", system=False),
    "qwen3": Kind(QWEN3, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>", _qwen3,
                  added=("<think>", "</think>")),
}  # fmt: skip


def write_tokenizer(folder: Path, kind: Kind, merges: tuple[tuple[str, str], ...] = ()) -> Path:
    """A tokenizer folder of the kind, with generation_config.json as a model's folder has it."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in kind.special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in kind.added])
    return save_tokenizer(folder, tokenizer, kind.template, [kind.eos, kind.stop], kind.bos)


def save_tokenizer(folder: Path, tokenizer: Tokenizer, template: str, stops: Sequence[str], bos: str | None) -> Path:
    """The folder of a model's tokenizer. `stops`: where its generation_config.json ends an answer, first its eos."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": stops[0], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | ({"bos_token": bos} if bos else {})))
    ends = [tokenizer.token_to_id(token) for token in stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def expected(folder: Path, kind: Kind, messages: list[dict[str, str]]) -> list[tuple[list[int], list[bool]]]:
    """Rows by hand: a control token that the template writes is one id, every byte of a text is one."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def ids(text: str) -> list[int]:
        if isinstance(text, C):
            return [tokenizer.token_to_id(text)]
        return [tokenizer.token_to_id(c) for part, _ in letters.pre_tokenize_str(text) for c in part]

    found = []
    for row in kind.rows(messages):
        parts = [(ids(text), counted) for text, counted in row]
        numbers = [number for part, _ in parts for number in part]
        found.append((numbers, [counted for part, counted in parts for _ in part]))
    return found
