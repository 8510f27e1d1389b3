"""Rules of the sites section."""

from __future__ import annotations

import ipaddress
import re

from llmtrain.config.problems import Problems
from llmtrain.config.run import RunConfig


def check_sites(run: RunConfig, problems: Problems) -> None:
    """A site has a name and a coordinator, and addresses that only other sites reach."""
    sites = run.sites
    if sites.name is None:
        if sites.coordinator is not None:
            problems.add("sites.coordinator", sites.coordinator, "this site has no name",
                         "set sites.name, or remove it")  # fmt: skip
        return
    if run.ema.decay is not None:
        problems.add("ema.decay", run.ema.decay, "sites would each have another average (sites.name)", "remove it, or "
                     "average checkpoints with `llmtrain checkpoint average`")  # fmt: skip
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", sites.name):
        problems.add("sites.name", sites.name, "must be 1 to 40 letters, digits, `_`, `.` or `-`", "give another name")
    if not re.fullmatch(r"[^:/\s]+:[0-9]{1,5}", sites.coordinator or ""):
        problems.add("sites.coordinator", sites.coordinator, "must be HOST:PORT",
                     "start `llmtrain sites coordinator` and give its address")  # fmt: skip
    if sites.listen is not None and sites.keys is None and not private(sites.listen):
        problems.add("sites.listen", sites.listen, "must be an IP address of this host, and no public one: what sites "
                     "send is neither encrypted nor signed", "give a tunnel's address, or set sites.keys")  # fmt: skip
    for field, rule, remedy in sites.conflicts():
        key = f"sites.{field}"
        problems.add(key, getattr(sites, field), rule, remedy)
    longest = min(run.fault.stall_timeout_s, 0.75 * run.fault.timeout_s)
    if sites.timeout_s >= longest:
        problems.add("sites.timeout_s", sites.timeout_s, "must be less than fault.stall_timeout_s and 3/4 of "
                     f"fault.timeout_s, here {longest:g}: while a synchronisation waits, a site shows no progress",
                     "lower it, or raise them")  # fmt: skip


_PRIVATE = tuple(
    map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "169.254.0.0/16",
                               "::1/128", "fc00::/7", "fe80::/10"))
)  # fmt: skip
"""Networks of one owner, of one line and of one host. What is not here is not private: a provider's customers share
100.64.0.0/10, 240.0.0.0/4 is routed by some, and 6to4, Teredo and NAT64 hold addresses of everywhere."""


def private(address: str) -> bool:
    """Return True for an IP address that no other network reaches, also in the form `::ffff:a.b.c.d`.

    0.0.0.0 and :: are every address of a host. Every address that a site listens on without keys is judged here.
    """
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    found = getattr(found, "ipv4_mapped", None) or found
    return any(found in network for network in _PRIVATE if network.version == found.version)
