"""Rules of the section `sites`."""

from __future__ import annotations

import ipaddress
import re

from llmtrain.base.choice import Rule
from llmtrain.config.rules import value_of
from llmtrain.config.run import RunConfig
from llmtrain.features.sites.outer_methods import SitesConfig, Streaming

_SITE = {"sites.name": "a", "sites.coordinator": "h:1"}
_STREAMING = {**_SITE, "sites.method": "streaming"}


def _sites(config: RunConfig) -> SitesConfig:
    return config.section(SitesConfig)


def _is_site(config: RunConfig) -> bool:
    return _sites(config).name is not None


def _streaming(config: RunConfig) -> Streaming | None:
    section = _sites(config)
    return section if section.name is not None and isinstance(section, Streaming) else None


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule(("sites.coordinator",), lambda r: not _is_site(r) and _sites(r).coordinator is not None,
         "is for a run with sites.name, which is "
         "missing", "set sites.name, or remove it", {"sites.coordinator": "h:1"}),
    Rule(("ema.decay",), lambda r: _is_site(r) and value_of("ema.decay", r) is not None,
         "each site (sites.name) would have a different average",
         "remove it, or average checkpoints with `llmtrain checkpoint average`", {**_SITE, "ema.decay": 0.9}),
    Rule(("sites.name",), lambda r: _is_site(r) and not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", _sites(r).name or ""),
         "must be 1 to 40 letters, digits, `_`, `.` or `-`", "give another name", {**_SITE, "sites.name": "a:b"}),
    Rule(("sites.coordinator",),
         lambda r: _is_site(r) and not re.fullmatch(r"[^:/\s]+:[0-9]{1,5}", _sites(r).coordinator or ""),
         "must be HOST:PORT", "start `llmtrain sites coordinator` and give its address", {"sites.name": "a"}),
    Rule(("sites.listen",),
         lambda r: _is_site(r) and (listen := _sites(r).listen) is not None and not private(listen),
         "must be a private IP address of this host, as messages between sites are neither encrypted nor signed",
         "give the address of a tunnel (WireGuard, ssh)", {**_SITE, "sites.listen": "8.8.8.8"}),
    Rule(("sites.timeout_s",), lambda r: _is_site(r) and _sites(r).timeout_s >= r.fault.longest_s,
         lambda r, _: "must be less than fault.stall_timeout_s and 3/4 of fault.timeout_s, here "
                      f"{r.fault.longest_s:g}: while a synchronisation waits, a site shows no progress",
         "lower it, or raise them", {**_SITE, "sites.timeout_s": 300}),
    Rule(("train.stop_early.metric",), lambda r: _is_site(r) and r.train.stop_early.metric is not None,
         "would end each site at a different step, and the other sites would wait for it", "remove it",
         {**_SITE, "train.stop_early.metric": "eval/loss", "train.eval_every": 10}),
    Rule(("data.stages",), lambda r: _is_site(r) and r.data.stages,
         "sites (sites.name) share the sequences of one data set, which must stay the same", "remove one of the two",
         {**_SITE, "data.stages": [{"from_step": 5, "sequence_length": 64}]}),
    # Each fragment's round has its own steps, and ends before the next one's begins.
    Rule(("sites.sync_every", "sites.fragments"),
         lambda r: (s := _streaming(r)) and s.sync_every % s.fragments,
         "sites.sync_every must be a multiple of sites.fragments", "change one of them",
         {**_STREAMING, "sites.sync_every": 10, "sites.overlap_steps": 1}),
    Rule(("sites.overlap_steps", "sites.sync_every", "sites.fragments"),
         lambda r: (s := _streaming(r)) and s.overlap_steps > s.most_overlap,
         lambda r, _: f"sites.overlap_steps must be at most {value_of('sites.most_overlap', r)}: less than "
                      "sites.sync_every / sites.fragments, and no more than sites.max_alone_steps",
         "lower it, or raise sites.sync_every", {**_STREAMING, "sites.sync_every": 20}),
    Rule(("resume_data",), lambda r: _is_site(r) and r.resume_data == "new",
         "sites (sites.name) share the order of one data set, which must continue",
         "remove it, or begin new sites from the parameters: resume_weights_only",
         {**_SITE, "resume_data": "new", "resume": "runs/other"}),
)
# fmt: on


_PRIVATE = tuple(
    map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "169.254.0.0/16",
                               "::1/128", "fc00::/7", "fe80::/10"))
)  # fmt: skip
"""Networks of one owner, one line and one host. Others are not private: a provider's customers share 100.64.0.0/10,
some route 240.0.0.0/4, and 6to4, Teredo and NAT64 hold public addresses."""


def private(address: str) -> bool:
    """Return True for an IP address that no other network reaches, also in the form `::ffff:a.b.c.d`.

    0.0.0.0 and :: are every address of a host. It decides on every address that a site listens on.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return any(ip in network for network in _PRIVATE if network.version == ip.version)
