"""Sites of one rank, and a server of one rank's elements."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.features.sites.sample_ledger import Share
from llmtrain.features.sites.site import Site
from llmtrain.features.sites.transport import Server
from tests.features.sites.sites_in_threads import PIECES, Meeting, Numbers, begin_all, settings_of


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("127.0.0.1", run="run", member="a:1", pieces=PIECES, limit_s=60)
    server.publish(3, {"values": np.arange(65, dtype=np.float32)})
    yield server
    server.close()


@pytest.fixture
def joined() -> Iterator[Callable[..., tuple[Site, Numbers, list]]]:
    """Makes sites of one rank."""
    with contextlib.ExitStack() as stack:

        def join(
            meeting: Meeting,
            name: str,
            *,
            tokens: int = 8,
            common: str = "x",
            last_step: int | None = None,
            **changes: Any,
        ) -> Any:
            engine, events = Numbers(), []
            site = Site(
                engine,
                Ranks(),
                settings_of(name, **changes),
                {"data": common},
                Share(batch=tokens // 4, tokens=tokens),
                lambda kind, **fields: events.append((kind, fields)),
                members=meeting.member,
                last_step=last_step,
            )
            return stack.enter_context(site), engine, events

        yield join


Begun = tuple[Meeting, list[tuple[Site, Numbers, list]]]


@pytest.fixture
def begun(joined: Callable[..., tuple[Site, Numbers, list]]) -> Callable[..., Begun]:
    """Makes sites of one letter that have begun together, and their coordinator."""

    def begin(names: str, **changes: Any) -> Begun:
        meeting = Meeting(*names)
        made = [joined(meeting, name, **changes) for name in names]
        begin_all(*(site for site, _, _ in made))
        return meeting, made

    return begin
