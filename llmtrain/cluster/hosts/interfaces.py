"""What GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name on a host: read by its ranks before they meet, and by doctor."""

from __future__ import annotations

from collections.abc import Collection

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def named(variable: str, value: str, here: Collection[str]) -> list[str] | None:
    """The interfaces that the variable names; None when the backend would end with an error instead.

    gloo makes a device of every name in the list, and each must be there (torch/csrc/distributed/c10d/init.cpp). NCCL
    takes names for beginnings of names, `=` before the list for whole ones, `^` before that for all others, NAME:PORT
    for NAME, and needs one that is there (src/misc/socket.cc, ncclFindInterfaces).

    Args:
        variable: GLOO or NCCL.
        value: not empty.
        here: the interfaces that have an address, in the kernel's order.
    """
    if variable == GLOO:
        words = [word for word in value.split(",") if word]
        return words if words and all(word in here for word in words) else None
    others, value = value.startswith("^"), value.removeprefix("^")
    exact, value = value.startswith("="), value.removeprefix("=")
    words = [word.partition(":")[0] for word in value.split(",") if word]
    found = [n for n in here if others != any(n == word if exact else n.startswith(word) for word in words)]
    return found or None
