"""The connections with which a rank begins: where others fetch from it, and on rank 0 the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llmtrain.base import log
from llmtrain.config.sites import SitesConfig
from llmtrain.sites.forward import to_coordinator
from llmtrain.sites.keys import Keys, differs
from llmtrain.sites.members import Members, SitesError, own_address
from llmtrain.sites.wire import Pieces, Server


def opened(
    settings: SitesConfig, rank: int, run: str, site: str, pieces: Pieces, members: Callable[[str, str, float], Members]
) -> tuple[Keys | None, Server, Members | None]:
    """(this site's keys if it has some, what serves this rank's elements, the other sites on rank 0).

    Args:
        run: what the sites have in common.
        site: this one's id.
        pieces: what the rank owns.
        members: from the coordinator's address, the id and seconds to connect.

    Raises:
        SitesError: the coordinator is not there, torchft is missing, the address is a public one.
    """
    assert settings.coordinator is not None
    keys = Keys(Path(settings.keys), "sites.keys") if settings.keys is not None else None
    host = settings.listen or own_address(settings.coordinator, encrypted=keys is not None)
    server = Server(host, run=run, member=site, pieces=pieces, limit_s=settings.timeout_s, keys=keys)
    if rank:
        return keys, server, None
    if keys is None:
        log.warn(
            f"site {settings.name} has no sites.keys: nothing that sites send is encrypted or signed. Whoever reaches "
            f"{settings.coordinator} or {server.address} can read the parameters, take part under any name, send "
            "updates within the limits, tell a site that joins of a state, and stop the meetings"
        )
    coordinator = to_coordinator(settings.coordinator, keys).address if keys else settings.coordinator
    try:
        return keys, server, members(coordinator, site, settings.timeout_s)
    except SitesError as error:
        if why := differs(settings.coordinator, keys):
            raise SitesError(f"sites.coordinator {settings.coordinator}: {why}.") from error
        raise SitesError(str(error).replace(coordinator, settings.coordinator)) from error
