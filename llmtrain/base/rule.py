"""A rule between settings is a row: the check, the documentation, `--help` and the tests read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Text = str | Callable[[Any, str], str]
"""A sentence, or a function that makes it for a subject and the key that breaks the rule."""


@dataclass(frozen=True, eq=False)
class Rule:
    """A combination of settings that is refused."""

    keys: tuple[str, ...]
    """Dotted keys of a run or of its DeepSpeed JSON whose values the message shows."""
    broken: Callable[[Any], Any]
    """True (or a list of keys, with `each`) for a subject that breaks the rule."""
    reason: Text
    remedy: Text
    example: Mapping[str, Any]
    """Dotted key -> value: settings that break the rule in an otherwise valid run."""
    each: bool = False
    """`broken` returns a list of mistakes: a key that replaces the first of `keys`, or a tuple that replaces `keys`."""

    def breaks(self, subject: Any) -> Iterator[tuple[tuple[str, ...], str, str]]:
        """(keys, reason, remedy) of each mistake."""
        found = self.broken(subject)
        for broken in found if self.each else [self.keys] if found else []:
            keys = (broken, *self.keys[1:]) if isinstance(broken, str) else broken
            reason, remedy = (text if isinstance(text, str) else text(subject, keys[0])
                              for text in (self.reason, self.remedy))  # fmt: skip
            yield keys, reason, remedy
