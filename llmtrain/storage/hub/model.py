"""Selects the files of a model's repository: its settings, and the safetensors that they name. Never a pickle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmtrain.base import untrusted
from llmtrain.base.errors import ModelError
from llmtrain.storage.hub.names import INDEX, SINGLE, Repository, is_name
from llmtrain.storage.hub.transfer import Choose, Wrong, fetch

_SETTINGS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_TEMPLATES = "additional_chat_templates/"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def model_folder(given: str, revision: str | None = None, *, asked_by: str) -> Path:
    """The folder of a whole model: `given`, or what ORG/NAME is on the Hub, once it is here. `asked_by`: for messages.

    Raises: ModelError.
    """
    if not is_name(given):
        return Path(given)

    def wrong(text: str) -> ModelError:
        return ModelError(f"{asked_by}: {given}: {text.rstrip('.')}.")

    return fetch(Repository(kind="model", name=given), revision, [settings, weights(wrong)], wrong).folder


def settings(names: Sequence[str], _: Path) -> list[str]:
    """Configuration, tokenizer, templates, licence: what lies beside the weights and is no code."""
    beside = [n for n in names if "/" not in n or (n.startswith(_TEMPLATES) and n.count("/") == 1)]
    return [n for n in beside if n.endswith(_SETTINGS) or n.startswith(("LICENSE", "NOTICE"))]


def weights(wrong: Wrong) -> Choose:
    """The weight files that transformers would take, of which a repository may have other copies."""

    def choose(names: Sequence[str], folder: Path) -> list[str]:
        if INDEX not in names:
            if SINGLE in names:
                return [SINGLE]
            pickles = [name for name in names if name.endswith(_PICKLES)]
            has = f"it has {', '.join(pickles[:3])}, and pickles are not read" if pickles else "it has no weights"
            raise wrong(
                f"the repository has no {SINGLE} and no {INDEX}: {has}. Name a repository, or a revision of this one, "
                "that has safetensors"
            )
        if SINGLE in names:
            raise wrong(f"the repository has both {SINGLE} and {INDEX}. One is stale: name a revision with one of them")
        try:
            found = sorted(set(untrusted.loads((folder / INDEX).read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise wrong(f"its {INDEX} is not a weight index: {error!r}") from error
        if odd := [n for n in found if not str(n).endswith(".safetensors") or Path(str(n)).name != n]:
            raise wrong(f"its {INDEX} names {odd[0]!a}, which is no safetensors file of the repository")
        return found

    return choose
