"""Facts of each host's GPUs and InfiniBand ports -> findings. Pure functions, as in checks.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmtrain.base.units import GIB, size
from llmtrain.cluster.doctor.checks import Finding, Level, Survey
from llmtrain.cluster.gpus import as_list, memory_fault, read_xids, section
from llmtrain.cluster.hosts.hostfile import Host

_LEAST_DRIVER = {"12": 525, "13": 580}
"""By CUDA's major version: NVIDIA's table of compatibility, Linux."""
_MIB = 1 << 20
_IDLE_BYTES = GIB
"""What a driver and its daemons take of a GPU's memory is below this."""


def all_gpus(survey: Survey) -> list[Finding]:
    """What is wrong with the GPUs of each host that are to be used, and with its InfiniBand."""
    found = []
    for host in survey.hosts:
        facts = survey.facts.get(host.name, {})
        if not survey.on_cpu:
            found += list(_driver(host, survey, facts.get("devices") or {}, facts.get("packages") or {}))
        gpus = facts.get("gpus") or {}
        if gpus and not gpus["report"] and facts.get("devices", {}).get("nodes"):
            what = "nvidia-smi gives no report: a GPU may have failed, or the driver does not match its kernel module"
            fix = survey.on(host.name, "nvidia-smi; dmesg | grep -i nvrm")
            found.append(Finding(host=host.name, check="gpus", level="red", what=what, fix=fix))
        for index, gpu in _chosen(host, gpus.get("report", ())):
            found += list(_of_one_gpu(host, index, gpu, survey))
        found += list(_links(host, gpus.get("links", ())))
        found += list(_kernel_log(host, gpus.get("xids", ()), survey))
        found += list(_ports(host, facts.get("infiniband") or {}, survey))
    return found


def _driver(host: Host, survey: Survey, devices: Mapping[str, Any], packages: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether torch's build and the driver fit together."""
    torch, cuda, driver = packages.get("torch"), packages.get("cuda"), devices.get("driver")
    if not devices.get("count") or not torch:
        return
    wanted = f"torch=={torch.partition('+')[0]} --index-url https://download.pytorch.org/whl/cu126"
    another = f"on {host.name}: {survey.python} -m pip install --force-reinstall {wanted}"
    if not cuda:
        what = f"torch {torch} is a build without CUDA, and there are GPUs: the ranks would refuse to start"
        yield Finding(host=host.name, check="versions", level="red", what=what, fix=another)
        return
    least = _LEAST_DRIVER.get(cuda.partition(".")[0])
    series = (driver or "").partition(".")[0]
    if least is not None and series.isdigit() and int(series) < least:
        what = f"driver {driver} is too old for torch's CUDA {cuda}, which needs {least} or newer"
        fix = f"update the driver, or take a build for CUDA 12: {another}"
        yield Finding(host=host.name, check="versions", level="red", what=what, fix=fix)


def _chosen(host: Host, gpus: Sequence[Any]) -> list[tuple[int, Any]]:
    """Those that the hostfile gives to ranks, with their numbers."""
    return [(index, gpu) for index, gpu in enumerate(gpus) if index in host.devices]


def _of_one_gpu(host: Host, index: int, gpu: Mapping[str, Any], survey: Survey) -> Iterator[Finding]:
    def finding(level: Level, what: str, fix: str) -> Finding:
        return Finding(host=host.name, check="gpus", level=level, what=f"GPU {index} ({gpu['bus']}): {what}", fix=fix)

    if fault := memory_fault(gpu):
        reset = survey.on(host.name, f"nvidia-smi --gpu-reset -i {index}")
        yield finding("red", fault, f"leave it out (--exclude {host.name}:{index}) until it is reset: {reset}")
    state, status = (str(section(gpu, "Fabric").get(key, "N/A")) for key in ("State", "Status"))
    if state not in ("N/A", "Completed") or status not in ("N/A", "Success"):
        fix = survey.on(host.name, "systemctl restart nvidia-fabricmanager") + "     (of the driver's version)"
        yield finding("red", f"it has not joined the NVLink fabric (state {state}, status {status})", fix)
    if section(gpu, "MIG Mode").get("Current") == "Enabled":
        what = "MIG is on: CUDA shows a process one instance of it, and NCCL cannot join two of one GPU"
        level: Level = "red" if host.slots > 1 else "yellow"
        yield finding(level, what, survey.on(host.name, f"nvidia-smi -i {index} -mig 0"))
    yield from _in_use(finding, gpu, survey.on(host.name, "nvidia-smi"))


def _in_use(finding: Any, gpu: Mapping[str, Any], look: str) -> Iterator[Finding]:
    memory = section(gpu, "FB Memory Usage")
    used, total = (_bytes(memory.get(key)) for key in ("Used", "Total"))
    processes = section(gpu, "Processes")
    kinds, pids = as_list(processes.get("Type", [])), as_list(processes.get("Process ID", []))
    computing = [pid for pid, kind in zip(pids, kinds, strict=False) if "C" in kind]
    if used < _IDLE_BYTES and not computing:
        return
    who = f"by process {', '.join(computing[:4])}" if computing else "by processes that are not seen (a container?)"
    what = f"it is in use {who}: {size(used)} of {size(total)} memory taken"
    yield finding("red" if 2 * used > total else "yellow", what, f"end what uses it, or leave it out: {look}")


def _bytes(text: Any) -> int:
    """ "81559 MiB" """
    number = str(text).partition(" ")[0]
    return int(number) * _MIB if number.isdigit() else 0


def _links(host: Host, links: Sequence[Sequence[int]]) -> Iterator[Finding]:
    most = max((up for up, _ in links), default=0)
    for index, (up, _) in _chosen(host, links):
        if up < most:
            what = f"GPU {index}: {up} NVLinks are up, where others of the host have {most}"
            fix = f"on {host.name}: nvidia-smi nvlink -s -i {index}; reseat or reset it, and look for Xid 74 in dmesg"
            yield Finding(host=host.name, check="gpus", level="red", what=what, fix=fix)


def _kernel_log(host: Host, lines: Sequence[str], survey: Survey) -> Iterator[Finding]:
    """Yellow: it tells of the past day, and what still holds shows in the report."""
    xids = sorted(read_xids(lines), key=lambda xid: not xid.unfit)
    if xids:
        more = f" and {len(xids) - 3} more" if len(xids) > 3 else ""
        what = f"the kernel log of the past day has {'; '.join(map(str, xids[:3]))}{more}"
        fix = "look before a long run: " + survey.on(host.name, "dmesg -T | grep -i xid")
        yield Finding(host=host.name, check="gpus", level="yellow", what=what, fix=fix)


def _ports(host: Host, ports: Mapping[str, Mapping[str, Any]], survey: Survey) -> Iterator[Finding]:
    """Ports of InfiniBand cards: NCCL takes all that are up, and the slowest holds up the rest."""
    up = {name: port for name, port in ports.items() if port["state"] == "ACTIVE"}
    elsewhere = any(
        port["state"] == "ACTIVE"
        for facts in survey.facts.values()
        for port in (facts.get("infiniband") or {}).values()
    )
    look = survey.on(host.name, "ibstat")
    if ports and not up and elsewhere:
        what = f"none of its {len(ports)} InfiniBand ports is up, and other hosts' are: NCCL would not reach them"
        yield Finding(host=host.name, check="interface", level="red", what=what, fix=f"cable, switch, opensm: {look}")
    for name, port in ports.items():
        rates = Counter(each["rate_gbit"] for each in up.values() if each["layer"] == port["layer"])
        usual = max(rates, default=0.0)
        what = ""
        if up and port["state"] != "ACTIVE" and port["physical"] == "LinkUp":
            what = f"InfiniBand port {name} has a cable, and is {port['state']}"
        elif name in up and port["rate_gbit"] < usual:
            what = f"InfiniBand port {name} has {port['rate_gbit']:g} Gbit/s, where others have {usual:g}"
        if what:
            fix = f"its cable and its port on the switch: {look}; or leave it out with NCCL_IB_HCA"
            yield Finding(host=host.name, check="interface", level="yellow", what=what, fix=fix)
