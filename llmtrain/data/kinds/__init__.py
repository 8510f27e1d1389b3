"""The kinds of rows, one class for each: imported when a folder, an objective or a command asks for it."""

from llmtrain.base.errors import DataError
from llmtrain.data.kinds.kind import RowKind
from llmtrain.data.manifest import Manifest

__all__ = ["RowKind", "class_of", "kind_of"]

RowKind.CHOICES |= {  # in the order of --help
    "text": "llmtrain.data.kinds.text",
    "tokens": "llmtrain.data.kinds.tokens",
    "token-rows": "llmtrain.data.kinds.tokens",
    "chat": "llmtrain.data.kinds.chat",
    "preference": "llmtrain.data.kinds.preference",
    "unpaired": "llmtrain.data.kinds.judged",
    "prompt": "llmtrain.data.kinds.prompts",
    "choices": "llmtrain.data.kinds.choices",
}


def class_of(manifest: Manifest) -> type[RowKind] | None:
    """The class of a folder's rows; None: a plugin that this process does not have brings it."""
    try:
        return RowKind.named(manifest.settings.get("format", "text" if manifest.chat is None else "chat"))
    except KeyError:
        return None


def kind_of(manifest: Manifest, name: str) -> RowKind:
    """The kind of a folder's rows. `name`: of the folder, for messages. Raises DataError: its class is unknown."""
    format, kind = manifest.settings.get("format"), class_of(manifest)
    if kind is None:
        raise DataError(
            f"{name}: its rows are of the format {format!r}, and no class reads it; give the plugin that "
            "brings it with --plugin, or prepare the folder again with one of the formats "
            f"{', '.join(RowKind.CHOICES)}"
        )
    if kind.has_rows != (manifest.chat is not None):
        raise DataError(
            f"{name}: its format is {format}, but its manifest lists shards of another format; copy the "
            "folder again, or prepare it again"
        )
    return kind()
