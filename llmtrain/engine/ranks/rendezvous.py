"""Rendezvous of the ranks on one store, with a time limit and an error that names the missing or different ranks.

With torch's own start every rank waits 10 or 30 minutes for a missing one. And gloo uses the address of the hostname,
which on many machines is 127.0.0.1: of two such hosts one dies, and the other waits.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from llmtrain.base import log, units, untrusted
from llmtrain.base.errors import UserError, number_in
from llmtrain.base.rank import messages, watch
from llmtrain.base.rank.heartbeat import heart
from llmtrain.base.redact import redact
from llmtrain.base.threads import in_thread
from llmtrain.base.trees import leaves
from llmtrain.engine.ranks.device import device_id, device_name
from llmtrain.engine.ranks.ranks import Ranks, Seat
from llmtrain.models.parallel.mesh import host_group, mesh_of
from llmtrain.tracking.environment import versions

_COMPARED = ("python", "llmtrain", "torch", "deepspeed", "transformers")
_TELL_S = 30.0
"""Interval between two lines about missing ranks."""
_GRACE_S = 30.0
"""How much longer the other ranks wait than rank 0, because only rank 0 knows which ranks are missing."""
_SHOWN = 5


class RendezvousError(UserError):
    """The ranks of this launch have not found each other."""

    passing = True


class RanksDiffer(RendezvousError):
    """The ranks have found each other, but run different versions or settings."""

    passing = False


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What is known about all ranks after the rendezvous."""

    store: dist.Store
    """Key-value store that all ranks see, served by rank 0."""
    seats: tuple[Seat, ...]
    """The processes of all ranks, in order of rank."""


def meet(*, device: torch.device, backend: str, settings: Mapping[str, Any], limit_s: float) -> Meeting:
    """Wait for all ranks of the launch, and compare their versions and settings.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Sets each backend's network interface if the user
    has not.

    Args:
        backend: backend of the device's collectives, "nccl" or "gloo".
        settings: values that must be equal on all ranks; dicts and lists may be nested.
        limit_s: how long rank 0 waits for the others, and they for rank 0.

    Raises:
        RendezvousError: ranks are missing or differ, the port is in use, or rank 0 cannot be reached. Raised on all
            ranks that have come.
        ConfigError: a variable names an interface that this host lacks.
    """
    rank, world_size = number_in("RANK"), number_in("WORLD_SIZE")
    _meetings[_address()] = _number() + 1 if _address() in _meetings else 0
    interface = None
    if world_size > 1:
        from llmtrain.base.rank.interfaces import choose_interfaces

        interface = choose_interfaces(backend)
    seat = Seat(
        rank=rank,
        host=socket.gethostname(),
        local_rank=number_in("LOCAL_RANK"),
        device=device_name(device),
        pid=os.getpid(),
    )
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun's agent does
    store: dist.Store = _serve(world_size) if serves else _connect(seat, limit_s)
    if number := _number():  # torch's groups would find keys of an earlier training's groups
        store = dist.PrefixStore(f"training-{number}", store)
    if world_size == 1:
        return Meeting(store=store, seats=(seat,))
    installed = {**versions(), "python": ".".join(platform.python_version_tuple()[:2])}
    about = {
        "seat": asdict(seat),
        "device_id": device_id(device),
        "interface": interface,
        "versions": {name: installed[name] for name in _COMPARED},
        "settings": dict(leaves({**settings, "WORLD_SIZE": world_size})),
    }
    try:
        seats = _gather(store, about, world_size, limit_s) if rank == 0 else _follow(store, about, limit_s)
    except dist.DistError as error:
        raise RendezvousError(
            f"{_me(seat)} lost rank 0 at {_address()} while the ranks were meeting: its process has ended. Look at the "
            "output of rank 0."
        ) from error
    return Meeting(store=store, seats=tuple(Seat(**each) for each in seats))


_meetings: dict[str, int] = {}
"""Address -> number of this process's latest meeting there, from 0: a script may train several times."""
_served: dict[str, dist.TCPStore] = {}
"""Address -> the store that this process serves there; only for the latest address."""


def _number() -> int:
    return _meetings.get(_address(), 0)


def _address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _serve(world_size: int) -> dist.TCPStore:
    """Serve the store in this process. Raises RendezvousError if MASTER_PORT is in use or MASTER_ADDR is another
    host's."""
    host, port = os.environ["MASTER_ADDR"], number_in("MASTER_PORT")
    if port and _number() and _address() in _served:  # the other ranks may have connected to it already
        return _served[_address()]
    _served.clear()
    try:
        store = dist.TCPStore(host, port, world_size, True, timeout=timedelta(seconds=30), wait_for_workers=False)
        _served[_address()] = store
        return store
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise RendezvousError(
                f"MASTER_PORT is {port}, but on {socket.gethostname()} that port is in use{_user_of(port)}. Two "
                "launches on one host need different ports: give `deepspeed --master_port` another one, or end the "
                "process that uses it."
            ) from error
        trouble = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RendezvousError(
            f"rank 0 runs on {socket.gethostname()}, but MASTER_ADDR, where the other ranks look for it, is {host}, "
            f"which is no address of this host ({trouble}). Give `deepspeed --master_addr` an address of this host."
        ) from error


def _user_of(port: int) -> str:
    """Return " by process PID (NAME)" for the process that listens on the port, or "" if this user may not see it."""
    with contextlib.suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.laddr and each.laddr.port == port and each.status == psutil.CONN_LISTEN and each.pid:
                return f" by process {each.pid} ({psutil.Process(each.pid).name()})"
    return ""


def _connect(seat: Seat, limit_s: float) -> dist.TCPStore:
    """Connect to rank 0's store, with retries until the limit. Raises RendezvousError."""
    host, port = os.environ["MASTER_ADDR"], number_in("MASTER_PORT")
    deadline = time.monotonic() + limit_s
    pause_s, trouble = 0.05, ""
    while True:
        # Try a plain connection first: torch's client prints a stack for each refusal, and hides the reason.
        try:
            with socket.create_connection((host, port), timeout=min(10.0, limit_s)):
                break
        except OSError as error:
            trouble = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"{_me(seat)} found no listener at MASTER_ADDR:MASTER_PORT {_address()} for {limit_s:g} s ({trouble}; "
                f"fault.start_timeout_s). {_why_unreachable(host)}"
            )
        time.sleep(pause_s)
        pause_s = min(1.0, 2 * pause_s)
    # In a thread, because torch's client has no time limit for a server of another kind, which never answers.
    timeout = timedelta(seconds=30)
    store = in_thread(lambda: dist.TCPStore(host, port, timeout=timeout, wait_for_workers=False), "store")
    try:
        return store.result(max(10.0, deadline - time.monotonic()))
    except (dist.DistError, TimeoutError):
        raise RendezvousError(
            f"{_me(seat)}: the server at MASTER_ADDR:MASTER_PORT {_address()} is not rank 0 of a training. Give "
            "`deepspeed --master_port` a port that nothing else uses."
        ) from None


def _why_unreachable(host: str) -> str:
    if host == "localhost" or host.startswith("127."):
        return "That is this very host: with several hosts, give `deepspeed --master_addr` an address of rank 0's host."
    return (
        "Either rank 0 has failed to start (look at its output), or this host cannot reach its port: "
        "`llmtrain doctor --hostfile HOSTS` shows which."
    )


def _gather(store: dist.Store, about: dict[str, Any], world_size: int, limit_s: float) -> list[dict[str, Any]]:
    """As rank 0, wait for the others, compare them and send the verdict. Returns the seats in order of rank. Raises
    RendezvousError."""
    expected = _launched_hosts()
    came: dict[int, dict[str, Any]] = {0: about}
    deadline, tell = time.monotonic() + limit_s, time.monotonic() + _TELL_S
    twice, kind = "", RendezvousError
    while len(came) < world_size and time.monotonic() < deadline and not twice:
        for rank in (r for r in range(world_size) if r not in came):
            if store.check([_key("about", rank)]):
                came[rank] = _about(store.get(_key("about", rank)), rank)
        twice = store.get(_key("twice")).decode() if store.check([_key("twice")]) else ""
        if time.monotonic() > tell:
            tell += _TELL_S
            log.info(f"waiting for {_missing(came, world_size, expected)}")
        time.sleep(0.02 if world_size < 64 else 0.2)
    if twice:
        problem = twice
    elif len(came) < world_size:
        problem = (
            f"{_missing(came, world_size, expected)} had not connected to {_address()} after {limit_s:g} s "
            "(fault.start_timeout_s). They have failed to start, or cannot reach that port: look at their output, or "
            "ask `llmtrain doctor --hostfile HOSTS`."
        )
    else:
        everyone = [came[rank] for rank in range(world_size)]
        problem, kind = _differences(everyone) or _shared_devices(everyone), RanksDiffer
    seats = [came[rank]["seat"] for rank in sorted(came)]
    store.set(_key("verdict"), json.dumps({"problem": problem, "differ": kind is RanksDiffer, "seats": seats}))
    if problem:
        # This process serves the store, so it must not end before the others have read the verdict.
        patience = time.monotonic() + 5.0
        while store.add(_key("read"), 0) < len(came) - 1 and time.monotonic() < patience:
            time.sleep(0.02)
        raise kind(problem)
    _log_interfaces(list(came.values()))
    return seats


def _about(said: bytes, rank: int) -> dict[str, Any]:
    """Return a rank's report after checking it, as anyone can write into the store. Raises RendezvousError."""
    try:
        about = untrusted.loads(said, infinite=True)
        parts = [about[part] for part in ("versions", "settings", "seat")]
        if Seat(**about["seat"]).rank != rank or not all(isinstance(part, dict) for part in parts):
            raise ValueError(f"it is of rank {about['seat']['rank']}")
        return {"device_id": None, "interface": None, **about}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RendezvousError(
            f"the report of rank {rank} at {_address()} is not llmtrain's ({untrusted.first_line(error, 80)}): another "
            "program writes into that store. Give `deepspeed --master_port` another port."
        ) from None


def _follow(store: dist.Store, about: dict[str, Any], limit_s: float) -> list[dict[str, Any]]:
    """As another rank, report to rank 0 and read the verdict. Returns the seats in order of rank. Raises
    RendezvousError."""
    seat = Seat(**about["seat"])
    if store.add(_key("came", seat.rank), 1) > 1:
        problem = (
            f"rank {seat.rank} connected to {_address()} twice, the second time from {seat.host}: two launches use one "
            "address and port. Give `deepspeed --master_port` of one of them another one."
        )
        store.set(_key("twice"), problem)
        raise RendezvousError(problem)
    store.set(_key("about", seat.rank), json.dumps(about))
    try:
        store.wait([_key("verdict")], timedelta(seconds=limit_s + _GRACE_S))
    except dist.DistStoreError as error:
        raise RendezvousError(
            f"{_me(seat)} is connected to rank 0 at {_address()}, which has not answered for {limit_s + _GRACE_S:g} s. "
            "Look at the output of rank 0."
        ) from error
    verdict = json.loads(store.get(_key("verdict")))
    store.add(_key("read"), 1)
    if verdict["problem"]:
        raise (RanksDiffer if verdict["differ"] else RendezvousError)(verdict["problem"])
    seats: list[dict[str, Any]] = verdict["seats"]
    return seats


def _key(what: str, rank: int | None = None) -> str:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives a restart
    return f"llmtrain/meet/{_launch()}/{attempt}/{what}" + ("" if rank is None else f"/{rank}")


@functools.cache
def _launch() -> str:
    """Return an identity of this launch, to detect another launch on the same port: the mark of `llmtrain launch`; on a
    single host the process of DeepSpeed's launcher, the parent of all ranks; else ""."""
    found = os.environ.get(messages.LAUNCH, "")
    if not found and os.environ.get("CROSS_SIZE") == "1" and _launched_hosts():
        parent = psutil.Process(os.getppid())
        found = f"{socket.gethostname()}-{parent.pid}-{parent.create_time()}"
    return found


def _me(seat: Seat) -> str:
    return f"rank {seat.rank} on {seat.host}"


def _launched_hosts() -> dict[int, str]:
    """Return rank -> host, from the arguments of DeepSpeed's launcher if that is the parent process; else {}."""
    with contextlib.suppress(psutil.Error, ValueError, AttributeError):
        for word in psutil.Process(os.getppid()).cmdline():
            if word.startswith("--world_info="):
                world = json.loads(base64.urlsafe_b64decode(word.partition("=")[2]))
                hosts = [host for host, devices in world.items() for _ in devices]
                return dict(enumerate(hosts))
    return {}


def _missing(came: Mapping[int, Any], world_size: int, expected: Mapping[int, str]) -> str:
    """Return the missing ranks as in "ranks 2-3 (node-2) of 4"."""
    by_host: dict[str, list[int]] = {}
    for rank in range(world_size):
        if rank not in came:
            by_host.setdefault(expected.get(rank, ""), []).append(rank)
    named = [f"{units.spans(ranks)} ({host})" if host else units.spans(ranks) for host, ranks in by_host.items()]
    count = sum(map(len, by_host.values()))
    more = f" and those of {len(named) - _SHOWN} more hosts" if len(named) > _SHOWN else ""
    return f"rank{'s' if count > 1 else ''} {', '.join(named[:_SHOWN])}{more} of {world_size}"


def _differences(everyone: Sequence[Mapping[str, Any]]) -> str:
    """Return a message with the values that differ between ranks; "" if none do."""
    for what, remedy in (
        ("versions", "Install the same versions on all hosts"),
        ("settings", "Give all hosts the same YAML, JSON and command line"),
    ):
        keys = sorted({key for each in everyone for key in each[what]})
        wrong = [key for key in keys if len({json.dumps(each[what].get(key)) for each in everyone}) > 1]
        if wrong:
            shown = "; ".join(f"{key} is {_by_value(key, what, everyone)}" for key in wrong[:_SHOWN])
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            return f"the ranks do not run the same thing: {shown}{more}. {remedy}: they would diverge during training."
    return ""


def _shared_devices(everyone: Sequence[Mapping[str, Any]]) -> str:
    """Return a message about ranks of one host that share a GPU, which NCCL refuses; "" if none do."""
    by_device: dict[tuple[str, str], list[int]] = {}
    for each in everyone:
        if each["device_id"]:
            by_device.setdefault((each["seat"]["host"], each["device_id"]), []).append(each["seat"]["rank"])
    for (host, _), ranks in by_device.items():
        if len(ranks) > 1:
            return (
                f"ranks {units.spans(ranks)} have the same GPU of {host}: the host has fewer GPUs than slots in the "
                "hostfile. Set its slots to the number of its GPUs, or let the scheduler give each task its own GPU."
            )
    return ""


def _by_value(key: str, what: str, everyone: Sequence[Mapping[str, Any]]) -> str:
    """Return who has which value, as in "2.12 on node-1, 2.13 on node-2 and node-3"."""
    hosts: dict[str, list[str]] = {}
    for each in everyone:
        value = each[what].get(key)
        shown = "missing" if value is None else str(redact({key.rpartition(".")[2]: value}).popitem()[1])
        on = hosts.setdefault(shown, [])
        if each["seat"]["host"] not in on:
            on.append(each["seat"]["host"])
    if len({tuple(on) for on in hosts.values()}) < len(hosts):  # ranks of one host differ
        hosts = {}
        for each in everyone:
            hosts.setdefault(str(each[what].get(key)), []).append(f"rank {each['seat']['rank']}")
    return ", ".join(f"{value} on {_some(on)}" for value, on in hosts.items())


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _log_interfaces(everyone: Sequence[Mapping[str, Any]]) -> None:
    chosen = {each["seat"]["host"]: each["interface"] for each in everyone}
    if len(chosen) == 1:
        return
    kinds = sorted(set(filter(None, chosen.values())))
    if len(kinds) == 1 and all(chosen.values()):
        log.info(f"network between the {len(chosen)} hosts: {kinds[0]}")
    else:
        named = [f"{host} {interface or '(not set)'}" for host, interface in chosen.items()]
        log.info(f"network between the hosts: {_some(named)}")


def connect_all(meeting: Meeting, backend: str, device: torch.device, limit_s: float) -> Any:
    """Make the process group of all ranks, and return their gloo group. Raises RendezvousError if that fails."""
    limit, world_size = timedelta(seconds=limit_s), len(meeting.seats)
    rank = number_in("RANK")
    # As in DeepSpeed (comm/torch.py), but not for a single rank: with a device, every later group costs a split.
    bound = device if device.type == "cuda" and world_size > 1 else None
    heart.phase("connect")  # NCCL has no time limit here, but the watch has
    connecting = backend
    try:
        dist.init_process_group(
            backend, store=meeting.store, rank=rank, world_size=world_size, timeout=limit, device_id=bound
        )
        connecting = "gloo"
        return host_group(None, limit_s)
    except RuntimeError as error:  # gloo raises no class of its own
        raise _not_connected(f"rank {rank} on {meeting.seats[rank].host}", connecting, str(error)) from error


def _not_connected(who: str, backend: str, message: str) -> RendezvousError:
    """Return the error for a failed connection. `message`: the error text of `backend` ("nccl" or "gloo")."""
    from llmtrain.base.rank.device_faults import device_fault, with_reason
    from llmtrain.base.rank.interfaces import GLOO, NCCL

    name, variable = ("NCCL", NCCL) if backend == "nccl" else (backend, GLOO)
    head = f"{who} has met the others at {os.environ['MASTER_ADDR']}, but {name} cannot connect it to them"
    fault = device_fault(message)
    if fault is not None:
        found = RendezvousError(f"{head}: {fault.means} ({with_reason(message)}). {fault.remedy}")
        found.passing = fault.again
        return found
    return RendezvousError(
        f"{head} ({with_reason(message)}). Every host must reach every other one on all ports above 1024, over "
        f"interface {os.environ.get(variable, '(not set)')} ({variable})."
    )


def leave_all(error: BaseException | None) -> None:
    """Leave the process groups without waiting for ranks that may be gone. After an `error` on this rank alone, NCCL
    would wait for its collectives and peers, so its groups are left to the end of the process."""
    alone = error is not None and not getattr(error, "everywhere", False)
    if dist.is_initialized() and not (alone and dist.get_backend() == "nccl"):
        # DeepSpeed also keeps the groups that it has made, and a second run in this process would use them.
        comm = sys.modules.get("deepspeed.comm")
        (comm if comm is not None and comm.is_initialized() else dist).destroy_process_group()
        mesh_of.cache_clear()  # its groups are destroyed, too


def introduce(ranks: Ranks) -> None:
    """Tell the agents of all hosts which ranks the run has. All ranks call it together."""
    agents = ranks.gather(watch.agent_address())
    watch.met([{**asdict(seat), "agent": agent} for seat, agent in zip(ranks.seats, agents, strict=True)])
