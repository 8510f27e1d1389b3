"""The cores of several hosts prepare a folder: `llmtrain prepare --on HOSTFILE`, or `--on slurm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmtrain.features import Feature

if TYPE_CHECKING:
    from llmtrain.data.prepare.pools import Place


class PrepareHosts(Feature):
    def options(self, command: str, add: Callable[..., Any]) -> None:
        if command == "prepare":
            about = (
                "let the cores of several hosts do it: a hostfile, or slurm (the nodes of this job); sources and --out "
                "lie in folders that all of them share, or in object stores; --processes is of each host"
            )
            add("--on", dest="places", type=_places, metavar="HOSTFILE", help=about)


def _places(where: str) -> Callable[[int | None], list[Place]]:
    def found(processes: int | None) -> list[Place]:
        from llmtrain.features.prepare_hosts.hosts import places_on

        return places_on(where, processes)

    return found


FEATURE = PrepareHosts()
