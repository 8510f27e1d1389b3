"""Read a Hugging Face tokenizer's folder: files, named tokens, chat templates, and the bytes of each token."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from llmtrain.base import untrusted
from llmtrain.base.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TEMPLATE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"
"""Folder of further templates, NAME.jinja; transformers takes tool_use for a conversation with tools."""
# All files of a tokenizer in a Hugging Face folder that are no code.
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    _TEMPLATE,
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def copy_tokenizer(source: Path, folder: Path, chat_template: Path | None = None) -> None:
    """Copy the tokenizer files of a Hugging Face folder. Raises DataError when it has no tokenizer.json.

    `chat_template`: a file with the template to use instead of the folder's own.
    """
    require(source)

    def write(target: Path) -> None:
        for name in _FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, target / name)
        if chat_template is not None:
            shutil.copyfile(chat_template, target / _TEMPLATE)  # instead of all of the folder's templates
        elif named := named_templates(source):
            (target / NAMED_TEMPLATES).mkdir()
            for file in named:
                shutil.copyfile(file, target / NAMED_TEMPLATES / file.name)

    write_folder(folder, write)


def named_templates(folder: Path) -> list[Path]:
    return sorted(file for file in (folder / NAMED_TEMPLATES).glob("*.jinja") if file.is_file())


def write_folder(folder: Path, write: Any) -> None:
    """Write the folder atomically: a kill leaves only `*.tmp`, which the next start removes."""
    partial = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    for path in filter(Path.is_file, partial.rglob("*")):
        with open(path, "rb") as stream:
            os.fsync(stream.fileno())
    partial.rename(folder)


_GROWTH = 1000
"""Most characters that a tokenizer may make from one character; Unicode's normal forms make 18."""


def refuse_unsafe(folder: Path) -> None:
    """Raise DataError for a tokenizer that loads code, or that makes a very long text from a short one."""
    path = folder / "tokenizer_config.json"
    try:
        key = untrusted.names_code(untrusted.loads(path.read_bytes())) if path.is_file() else None
        path = folder / "tokenizer.json"
        given = untrusted.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}); save the tokenizer again") from error
    if key:
        raise DataError(
            f"{folder / 'tokenizer_config.json'}: it asks for Python code of its own ({key}), which is not run.  "
            f"tokenizer.json needs none: remove {key} from the file"
        )
    for part in ("normalizer", "decoder"):
        if (growth := _growth(given.get(part) if isinstance(given, dict) else None)) > _GROWTH:
            raise DataError(
                f"{path}: its {part} turns one character into up to {growth:.3g}, and no text needs more "
                f"than {_GROWTH}: take the tokenizer from another source"
            )


def _growth(step: Any) -> float:
    """Return the most characters that a step of a tokenizer.json, with its inner steps, can make from one character."""
    if isinstance(step, list):
        return math.prod(map(_growth, step))
    if not isinstance(step, dict):
        return 1.0
    growth = max(1.0, *(_growth(step.get(inner)) for inner in ("normalizers", "decoders")))
    growth += len(str(step.get("prepend", "")))
    if step.get("type") == "Replace":
        fixed = str((step.get("pattern") or {}).get("String", ""))  # a regular expression may match nothing, anywhere
        growth = max(
            1.0, len(str(step.get("content", ""))) / len(fixed) if fixed else 1.0 + len(str(step.get("content")))
        )
    return growth


def require(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    if not folder.exists():
        raise DataError(
            f"--tokenizer {folder}: no such folder (looked from {Path.cwd()}); on the Hub a name has two parts, "
            "ORG/NAME, such as openai-community/gpt2; or use --vocab-size"
        )
    if not path.is_file():
        raise DataError(
            f"--tokenizer {folder}: no tokenizer.json in it; give the folder of a fast Hugging Face tokenizer "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) writes one), or use --vocab-size"
        )
    return path


def fingerprint(folder: Path) -> str:
    """Return a hash of tokenizer.json, which decides the ids of a text."""
    return xxhash.xxh3_128_hexdigest(require(folder).read_bytes())


def named_token(folder: Path, role: str) -> str | None:
    """Return the tokenizer's special token for `role`, such as eos_token; None: it names none.

    Raises DataError when a file that may name the token cannot be read.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            token = untrusted.loads(path.read_bytes()).get(role)
        except (ValueError, AttributeError) as error:
            raise DataError(f"{path}: is not a JSON object ({error}); save the tokenizer again") from error
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None


def chat_template(folder: Path, file: str | None) -> str:
    """Return the template in `file`, or else the folder's own. Raises DataError when there is none."""
    path = folder / _TEMPLATE if file is None else Path(file)
    try:
        if file is not None:
            return path.read_text()
        named = {each.name: each.read_text() for each in named_templates(folder)}
        if path.is_file() or named:
            first = path.read_text() if path.is_file() else ""
            return json.dumps([first, named]) if named else first
        path = folder / "tokenizer_config.json"
        own = untrusted.loads(path.read_bytes()).get("chat_template") if path.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: no chat template can be read from it ({error})") from error
    if not own:
        raise DataError(
            f"--tokenizer {folder}: it has no chat template, which says how a conversation is written; give the "
            "tokenizer of a chat model, or --chat-template FILE, such as DIR/launch/templates/turns.jinja, which "
            "`llmtrain init DIR` writes"
        )
    return own if isinstance(own, str) else json.dumps(own)


def stop_tokens(folder: Path, named: tuple[str, ...]) -> tuple[str, ...]:
    """Return the tokens at which generation stops: eos_token, each eos_token_id of the model's configurations, `named`.

    Raises DataError when a file cannot be read.
    """
    from tokenizers import Tokenizer

    tokens = [separator_token(folder)]
    for path in (folder / "generation_config.json", folder / "config.json"):
        try:
            ids = untrusted.loads(path.read_bytes(), infinite=True).get("eos_token_id") if path.is_file() else None
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{path}: is not a JSON object ({error}); correct it") from error
        if numbers := [number for number in (ids if isinstance(ids, list) else [ids]) if type(number) is int]:
            read = Tokenizer.from_file(str(require(folder)))
            tokens += [token for number in numbers if (token := read.id_to_token(number))]
    return tuple(dict.fromkeys((*tokens, *named)))


def surrounds(folder: Path) -> bool:
    """Return True if the tokenizer puts tokens around a text, other than a separator at the end. Raises DataError."""
    from tokenizers import Tokenizer

    from llmtrain.config.encoding import special_tokens  # a run encodes nothing

    before, after = special_tokens(require(folder).read_bytes())
    if not before and len(after) == 1:
        tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return tokenizer.token_to_id(separator_token(folder)) != after[0]
    return bool(before or after)


def separator_token(folder: Path) -> str:
    """Return the tokenizer's eos_token. Raises DataError: it names none."""
    token = named_token(folder, "eos_token")
    if token is None:
        raise DataError(
            f"{folder}: the tokenizer names no eos_token, which separates the documents; "
            'add "eos_token": "..." to its tokenizer_config.json'
        )
    return token


_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def byte_lengths(tokenizer_dir: Path, vocab_size: int) -> np.ndarray:
    """Return the bytes of each token, int64 [vocab_size]: summed over a text's tokens, the text's length in UTF-8.

    Special tokens have 0, and a part of a character the bytes that it stands for. If a decoder joins tokens with
    spaces, a token includes the space before it. Raises DataError: the tokenizer cannot be read.
    """
    from tokenizers import Tokenizer

    path = tokenizer_dir / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path}: the tokenizers library cannot read it ({error}); copy the folder again") from error
    lengths = np.zeros(vocab_size, dtype=np.int64)
    length_of = _length_of(tokenizer)
    for token, number in tokenizer.get_vocab(with_added_tokens=False).items():
        if number < vocab_size:
            lengths[number] = length_of(token)
    for number, added in tokenizer.get_added_tokens_decoder().items():
        if number < vocab_size:
            lengths[number] = 0 if added.special else len(added.content.encode())
    return lengths


def _length_of(tokenizer: Tokenizer) -> Any:
    """Return a function that counts the bytes of a token in the vocabulary's spelling."""
    kinds, decoder = _kinds(tokenizer), tokenizer.decoder
    if "ByteLevel" in kinds:
        return len  # a character for each byte
    if decoder is None:
        return lambda token: len(token.encode())

    def length(token: str) -> int:
        if "ByteFallback" in kinds and _BYTE.fullmatch(token):
            return 1
        # Decode the token twice in a row and count the second one: decoders drop a space at a text's beginning.
        return len(decoder.decode([token, token]).encode()) - len(decoder.decode([token]).encode())

    return length


def _kinds(tokenizer: Tokenizer) -> set[str]:
    if tokenizer.decoder is None:
        return set()
    settings = json.loads(tokenizer.decoder.__getstate__())
    return {step["type"] for step in [settings, *settings.get("decoders", [])]}
