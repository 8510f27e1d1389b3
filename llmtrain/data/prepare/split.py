"""Training or validation: which side a document, or a part of it, falls on.

Decided by the document itself (a conversation's by the rows that it trains, since one may stand there under two ids),
the fraction and the size of the whole input: by nothing that depends on the number of processes, on a kill, or on the
other documents' contents.
"""

from __future__ import annotations

import xxhash

from llmtrain.data.manifest import Split

_SMALLEST_CUT_BYTES = 4 << 10  # the end of anything shorter would be a fragment that tells nothing


def cut_above(fraction: float, total_bytes: int) -> int:
    """Bytes above which a document is cut, so that chance cannot leave a split empty, or make it much too large.

    A tenth of what the smaller split should get. Documents below that are many: that none of them falls into the
    smaller split has a chance of e^-10.
    """
    return max(_SMALLEST_CUT_BYTES, int(min(fraction, 1 - fraction) * total_bytes / 10))


def draw(data: bytes) -> float:
    """A number from 0 to 1 that the bytes decide alone. Below the fraction, a document is for validation: so equal
    documents never lie in both splits, and a larger fraction keeps what a smaller one held out."""
    return xxhash.xxh3_64_intdigest(data) / 2.0**64


def parts(text: str, data: bytes, fraction: float, cut_bytes: int) -> list[tuple[Split, str]]:
    """The document's text by split: whole on one side, or, if it is longer than `cut_bytes`, cut into the two.

    Cut, its end is for validation. Every character is on exactly one side, and neither side is blank.
    """
    if fraction and len(data) > cut_bytes and (at := _boundary(text, fraction)):
        return [("train", text[:at]), ("validation", text[at:])]
    return [("validation" if draw(data) < fraction else "train", text)]


def _boundary(text: str, share: float) -> int | None:
    """Position of a cut with about `share` of the characters after it: a paragraph's end, else a line's, else a word's.

    At most a tenth of the smaller part off the mark; a text without any of the three is cut at the mark itself.
    """
    begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
    mark = end - round((end - begin) * share)
    reach = min(mark - begin, end - mark) // 10
    for ending in ("\n\n", "\n", " "):
        found = (text.rfind(ending, mark - reach, mark), text.find(ending, mark, mark + reach))
        ends = [at + len(ending) for at in found if at >= 0]
        if ends:
            return min(ends, key=lambda at: abs(at - mark))
    return mark if begin < mark < end else None
