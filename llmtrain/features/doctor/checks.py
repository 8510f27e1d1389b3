"""Facts of each host -> findings about the host, its GPUs and InfiniBand ports. Pure functions of a Survey."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llmtrain.base.units import GIB, counted, duration, size
from llmtrain.cluster.gpus import as_list, memory_fault, read_xids, section
from llmtrain.cluster.hosts.hostfile import Host
from llmtrain.cluster.hosts.ssh import Trouble

CHECKS = (
    *("name", "ssh", "python", "versions", "code", "config", "files", "slots", "gpus", "env", "clock", "disk"),
    *("memory", "shm", "limits", "shared", "run dir", "ops", "port", "interface", "fabric"),
)
"""Columns of the table, in order."""
Level = Literal["red", "yellow"]
RANK_MEMORY_BYTES = GIB
SHM_A_RANK_BYTES = 128 << 20
"""Shared memory for NCCL, DeepSpeed's own all-reduce (69 MB) and the loader's workers; docker's default is 64 MiB."""
SLOW_DISK = 1e9
"""Bytes a second: an NVMe disk of 2018 writes 2e9."""
SKEW_S = 5.0
"""Least clock difference with which logs and events of hosts cannot be put in order."""
STALE_S = 600.0
"""Age of a dead build's lock: no op of DeepSpeed takes longer to compile."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One faulty cell of the table."""

    host: str
    check: str
    """One of CHECKS."""
    level: Level
    """red: the run would fail, hang or be wrong. yellow: it works, but slower or not everywhere."""
    what: str
    fix: str
    """A command, or another remedy."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder that a run reads on each host."""

    key: str
    """The run's key for it."""
    path: str
    """Absolute."""
    files: tuple[str, ...] = ()
    """Files in it that the run reads. Empty: it has to exist, and each host may have other files."""
    on_hub: bool = False
    """The path is a name on the Hub and must not exist: a folder would win over the repository."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Requirements of a run on its hosts."""

    files: tuple[str, ...]
    """Equal on all hosts: its YAML and its DeepSpeed JSON."""
    folders: tuple[Folder, ...] = ()
    """Folders that its ranks read, and the files in them."""
    folder: str
    """Folder of its checkpoints."""
    own_folders: bool
    """Each host may have a folder of its own at the path `folder`."""
    sent_bytes: float | None = None
    """Bytes that each host sends to others in an optimizer step, of the last plan; None: there is none."""
    patience_s: float = 300.0
    """Seconds without progress on any rank after which the run is ended."""
    ops: tuple[str, ...]
    """DeepSpeed ops that the run compiles at its start."""
    disks: Mapping[str, str] = field(default_factory=dict)
    """Key -> folder on a disk of each host that the run writes and reads in each step."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """All questions to the hosts, and their answers."""

    hosts: tuple[Host, ...]
    alone: bool = False
    """This machine is the only host: it was asked without ssh, as a launch starts its ranks without ssh."""
    on_cpu: bool = False
    """The ranks are to compute on the processors: DS_ACCELERATOR=cpu, which travels to them."""
    python: str
    """This process's interpreter, which DeepSpeed will start on each host."""
    folder: str
    """The working folder, on each host."""
    run_dir: str | None = None
    """Folder of the run, or of its checkpoints, or the nearest existing one above it."""
    own_folders: bool = False
    """Each host may have its own: checkpoint.dir is set."""
    port: int = 0
    """Port of the rendezvous, on the first host; 0: not asked."""
    ssh_port: int | None = None
    """Port of every sshd, where it is not 22."""
    folders: tuple[Folder, ...] = ()
    """Folders that the run reads on each host."""
    ops: tuple[str, ...] = ()
    """DeepSpeed ops that the run compiles if they are missing."""
    troubles: Mapping[str, Trouble] = field(default_factory=dict)
    facts: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Output of probe.py, by host; hosts that could not be asked are missing."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Hosts that ran the probe without returning facts, with their output."""
    skew_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Bounds of each host's clock difference to this host's; positive: ahead."""
    nonce: Mapping[str, bool] = field(default_factory=dict)
    """True for a host that sees the first host's new file in the run's folder."""

    def on(self, host: str, command: str) -> str:
        return command if self.alone else f"ssh {host} {shlex.quote(command)}"


def each_host(survey: Survey) -> list[Finding]:
    findings = []
    for host in survey.hosts:
        findings += list(_reached(host, survey))
        facts = survey.facts.get(host.name)
        if facts is not None:
            for check in _OF_ONE_HOST:
                findings += list(check(host, facts, survey))
    return findings


def _reached(host: Host, survey: Survey) -> Iterator[Finding]:
    trouble = survey.troubles.get(host.name)
    if trouble is not None:
        check = "name" if trouble.kind == "resolve" else "ssh"
        yield Finding(host=host.name, check=check, level="red", what=trouble.text, fix=trouble.remedy)
    failure = survey.failures.get(host.name)
    if failure is not None:
        fix = f"make the same environment there as here: python -m venv, or a container; wanted: {survey.python}"
        yield Finding(host=host.name, check="python", level="red", what=failure, fix=fix)


def _unanswered(host: Host, facts: dict[str, Any], survey: Survey) -> Iterator[Finding]:
    checks = {
        "packages": "versions",
        "devices": "slots",
        "environment": "env",
        "nonce": "shared",
        "interfaces": "interface",
        "infiniband": "interface",
        "folders": "files",
        "names": "name",
    }
    for look, why in facts.get("errors", {}).items():
        check = checks.get(look, look)
        if check in CHECKS:
            fix = "look on the host: " + survey.on(host.name, "df; uptime")
            yield Finding(host=host.name, check=check, level="red", what=f"could not be determined: {why}", fix=fix)


def _python(host: Host, facts: dict[str, Any], survey: Survey) -> Iterator[Finding]:
    executable = facts.get("python", {}).get("executable")
    if executable and executable != survey.python:
        what = f"no Python at {survey.python} (there is {executable}), and DeepSpeed starts the ranks with it"
        fix = f"on {host.name}: make the virtual environment at the same path, or mount it there"
        yield Finding(host=host.name, check="python", level="red", what=what, fix=fix)


def _folder(host: Host, facts: dict[str, Any], survey: Survey) -> Iterator[Finding]:
    code = facts.get("code")
    if code and not code["folder"]:
        what = f"there is no folder {survey.folder}, in which the ranks start"
        fix = f"on {host.name}: git clone to the same path, or mount it there"
        yield Finding(host=host.name, check="code", level="red", what=what, fix=fix)


def _slots(host: Host, facts: dict[str, Any], survey: Survey) -> Iterator[Finding]:
    devices = facts.get("devices")
    if not devices:
        return
    seen, highest = devices["count"], host.devices[-1] + 1
    anywhere = any(f.get("devices", {}).get("count") for f in survey.facts.values())
    visible = facts.get("environment", {}).get("CUDA_VISIBLE_DEVICES")
    if anywhere and seen and visible is not None:
        chosen = len([word for word in visible.split(",") if word.strip()])
        if chosen < host.slots:
            what = (
                f"CUDA_VISIBLE_DEVICES={visible} in a start file shows {chosen} of {seen} devices; slots={host.slots}"
            )
            fix = f"remove it from ~/.bashrc or ~/.ssh/environment of {host.name}; choose devices with --include"
            yield Finding(host=host.name, check="slots", level="red", what=what, fix=fix)
            return
    if anywhere and seen < highest:
        what = f"slots={highest}, but {counted(seen, 'device')} seen"
        if devices["nodes"] > seen:
            what += f" ({devices['nodes']} in /dev: one may have failed)"
        fix = f"write slots={seen} in the hostfile, or on {host.name}: nvidia-smi; dmesg | grep -i xid"
        yield Finding(host=host.name, check="slots", level="red", what=what, fix=fix)
    if not anywhere and host.slots > devices["cores"]:
        what = f"{host.slots} ranks on {counted(devices['cores'], 'core')}, and no device: they wait for each other"
        fix = f"write slots={devices['cores']} in the hostfile"
        yield Finding(host=host.name, check="slots", level="yellow", what=what, fix=fix)


def _clock(host: Host, facts: dict[str, Any], survey: Survey) -> Iterator[Finding]:
    low, high = survey.skew_s.get(host.name, (0.0, 0.0))
    # The bounds are as far apart as the answer took; only the certain difference counts.
    certain = low if low > 0 else high if high < 0 else 0.0
    if abs(certain) > SKEW_S:
        what = f"its clock is at least {duration(abs(certain))} {'ahead of' if certain > 0 else 'behind'} this host's"
        fix = f"on {host.name}: timedatectl set-ntp true     (or chronyc makestep)"
        yield Finding(host=host.name, check="clock", level="red", what=what, fix=fix)


def _disk(host: Host, facts: dict[str, Any], survey: Survey) -> Iterator[Finding]:
    for name, disk in facts.get("disk", {}).items():
        folder = f"{disk['path']} ({name})"
        level: Level | None = "red" if disk["free"] < GIB else "yellow" if disk["free"] < 5 * GIB else None
        if level is not None:
            fix = "make room: " + survey.on(host.name, f"du -xsh {shlex.quote(disk['path'])}")
            what = f"{size(disk['free'])} free for {folder}"
            yield Finding(host=host.name, check="disk", level=level, what=what, fix=fix)
        elif disk["inodes"] is not None and disk["inodes"] < 10_000:
            fix = "remove small files there: " + survey.on(host.name, f"df -i {shlex.quote(disk['path'])}")
            what = f"{disk['inodes']} files left to make in {folder}"
            yield Finding(host=host.name, check="disk", level="red", what=what, fix=fix)
        if disk["error"]:
            check = "disk" if name == "temporary files" else "run dir"
            fix = f"on {host.name}: chown, chmod or mount {shlex.quote(disk['path'])}, or give another train.run_dir"
            what = f"no file can be made in {folder}: {disk['error']}"
            yield Finding(host=host.name, check=check, level="red", what=what, fix=fix)


def _disks_of_steps(host: Host, facts: dict[str, Any], survey: Survey) -> Iterator[Finding]:
    for key, disk in facts.get("disks", {}).items():
        place, speeds = f"{disk['path']} ({key})", disk.get("speeds", {})
        slowest = min(speeds, key=speeds.__getitem__, default="")
        if disk["reason"]:
            fix = f"name a folder on a local disk of {host.name}, with the same path on each host"
            yield Finding(host=host.name, check="disk", level="red", what=f"{place}: {disk['reason']}", fix=fix)
        elif slowest and speeds[slowest] < SLOW_DISK:
            what = f"{place}: {slowest}s {size(speeds[slowest])} a second; a step moves 32 bytes a parameter"
            fix = "use an NVMe disk, several as one RAID 0, or offload to host memory (device: cpu)"
            yield Finding(host=host.name, check="disk", level="yellow", what=what, fix=fix)


def _memory(host: Host, facts: dict[str, Any], survey: Survey) -> Iterator[Finding]:
    memory = facts.get("memory")
    if memory and memory["free"] < host.slots * RANK_MEMORY_BYTES:
        what = f"{size(memory['free'])} of {size(memory['total'])} memory free for slots={host.slots}"
        fix = "see who has it: " + survey.on(host.name, "ps -eo pid,user,rss,args --sort -rss | head")
        level: Level = "red" if memory["free"] < host.slots * RANK_MEMORY_BYTES / 2 else "yellow"
        yield Finding(host=host.name, check="memory", level=level, what=what, fix=fix)


def _shm(host: Host, facts: dict[str, Any], survey: Survey) -> Iterator[Finding]:
    shm = facts.get("shm")
    if not shm:
        return
    need = host.slots * SHM_A_RANK_BYTES
    left = sum(shm["left"].values())
    if left > GIB or (left and shm["free"] < need):
        what = f"{size(left)} of /dev/shm are taken by DeepSpeed runs that have ended"
        # Processes of other containers that share /dev/shm are not seen from here.
        fix = "when no run is there, nor in a container: " + survey.on(host.name, shlex.join(["rm", *shm["left"]]))
        yield Finding(host=host.name, check="shm", level="yellow", what=what, fix=fix)
    if shm["free"] < need:
        what = f"/dev/shm has {size(shm['free'])} free of {size(shm['total'])}; slots={host.slots} needs {size(need)}"
        fix = f"on {host.name}: mount -o remount,size=50% /dev/shm     (docker run --shm-size 16g)"
        yield Finding(host=host.name, check="shm", level="red", what=what, fix=fix)


def _limits(host: Host, facts: dict[str, Any], survey: Survey) -> Iterator[Finding]:
    limits = facts.get("limits")
    if not limits:
        return
    ranks = sum(other.slots for other in survey.hosts)
    files = max(1024, 4 * ranks)
    wanted = [("nofile", "open files", files, "-n")]
    if limits["infiniband"]:
        wanted.append(("memlock", "bytes of locked memory", 1 << 40, "-l"))
    if not limits["root"]:  # root is exempt
        wanted.append(("nproc", "processes and threads", 512 * host.slots, "-u"))
    for name, words, least, flag in wanted:
        has = limits[name]
        if has is not None and has < least:
            need = "unlimited" if name == "memlock" else str(least)
            what = f"the limit of {words} is {has} (ulimit {flag}); this job needs {need}"
            fix = f"on {host.name}: '* - {name} {need}' into /etc/security/limits.conf, and no ulimit in ~/.bashrc"
            yield Finding(host=host.name, check="limits", level="red", what=what, fix=fix)


def _ops(host: Host, facts: dict[str, Any], survey: Survey) -> Iterator[Finding]:
    ops = facts.get("ops")
    if not ops:
        return
    for path, age_s in ops["locks"].items():
        if age_s > STALE_S:
            op = path.split("/")[-2]
            waits = "this run waits" if op in survey.ops else f"a run that compiles {op} waits"
            what = f"a dead build left the lock {path} {duration(age_s)} ago: {waits} for it without end"
            fix = survey.on(host.name, f"rm {shlex.quote(path)}") + "     (or llmtrain doctor --build-ops)"
            level: Level = "red" if op in survey.ops else "yellow"
            yield Finding(host=host.name, check="ops", level=level, what=what, fix=fix)
    missing = [name for name in survey.ops if name not in ops["built"]]
    if missing and not (ops["compiler"] and ops["ninja"]):
        tool = "a C++ compiler" if not ops["compiler"] else "ninja"
        what = f"{', '.join(missing)} must be compiled, and there is no {tool}"
        fix = f"on {host.name}: apt-get install g++ ninja-build"
        yield Finding(host=host.name, check="ops", level="red", what=what, fix=fix)
    elif missing:
        what = f"{', '.join(missing)} will be compiled when the run starts: about a minute"
        fix = "llmtrain doctor --build-ops with the same arguments"
        yield Finding(host=host.name, check="ops", level="yellow", what=what, fix=fix)


def _port(host: Host, facts: dict[str, Any], survey: Survey) -> Iterator[Finding]:
    port = facts.get("port", {})
    if port.get("error"):
        user = " ".join(port["users"].split()[5:6])
        what = f"the rendezvous port {survey.port} is not free ({port['error']}){': ' + user if user else ''}"
        fix = "take another: --master-port PORT (deepspeed --master_port PORT), or end what uses it"
        yield Finding(host=host.name, check="port", level="red", what=what, fix=fix)


def _nonce(host: Host, facts: dict[str, Any], survey: Survey) -> Iterator[Finding]:
    error = facts.get("nonce", {}).get("error")
    if error:
        what = f"a file in {survey.run_dir} could not be written to try whether the hosts share it: {error}"
        fix = f"on {host.name}: make it writable"
        yield Finding(host=host.name, check="shared", level="red", what=what, fix=fix)


_OF_ONE_HOST: Sequence[Callable[[Host, dict[str, Any], Survey], Iterator[Finding]]] = (
    *(
        _unanswered,
        _python,
        _folder,
        _slots,
        _clock,
        _disk,
        _disks_of_steps,
        _memory,
        _shm,
        _limits,
        _ops,
        _port,
        _nonce,
    ),
)


_LEAST_DRIVER = {"12": 525, "13": 580}
"""Least driver by CUDA's major version: NVIDIA's table of compatibility, Linux."""
_MIB = 1 << 20
_IDLE_BYTES = GIB
"""GPU memory in use that does not count: a driver and its daemons take less."""


def all_gpus(survey: Survey) -> list[Finding]:
    """Return findings about the chosen GPUs and the InfiniBand ports of each host."""
    findings = []
    for host in survey.hosts:
        facts = survey.facts.get(host.name, {})
        if not survey.on_cpu:
            findings += list(_driver(host, survey, facts.get("devices") or {}, facts.get("packages") or {}))
        gpus = facts.get("gpus") or {}
        if gpus and not gpus["report"] and facts.get("devices", {}).get("nodes"):
            what = "nvidia-smi gives no report: a GPU may have failed, or the driver does not match its kernel module"
            fix = survey.on(host.name, "nvidia-smi; dmesg | grep -i nvrm")
            findings.append(Finding(host=host.name, check="gpus", level="red", what=what, fix=fix))
        for index, gpu in _chosen(host, gpus.get("report", ())):
            findings += list(_of_one_gpu(host, index, gpu, survey))
        findings += list(_links(host, gpus.get("links", ())))
        findings += list(_kernel_log(host, gpus.get("xids", ()), survey))
        findings += list(_ports(host, facts.get("infiniband") or {}, survey))
    return findings


def _driver(host: Host, survey: Survey, devices: Mapping[str, Any], packages: Mapping[str, Any]) -> Iterator[Finding]:
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
    """Parse "81559 MiB"."""
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
    """Report Xid faults in the past day's kernel log. Yellow, since they may be over; nvidia-smi reports lasting
    ones."""
    xids = sorted(read_xids(lines), key=lambda xid: not xid.unfit)
    if xids:
        more = f" and {len(xids) - 3} more" if len(xids) > 3 else ""
        what = f"the kernel log of the past day has {'; '.join(map(str, xids[:3]))}{more}"
        fix = "look before a long run: " + survey.on(host.name, "dmesg -T | grep -i xid")
        yield Finding(host=host.name, check="gpus", level="yellow", what=what, fix=fix)


def _ports(host: Host, ports: Mapping[str, Mapping[str, Any]], survey: Survey) -> Iterator[Finding]:
    """Check InfiniBand ports: NCCL takes all that are up, and the slowest holds up the others."""
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
        rates = Counter(active["rate_gbit"] for active in up.values() if active["layer"] == port["layer"])
        usual = max(rates, default=0.0)
        what = ""
        if up and port["state"] != "ACTIVE" and port["physical"] == "LinkUp":
            what = f"InfiniBand port {name} has a cable, and is {port['state']}"
        elif name in up and port["rate_gbit"] < usual:
            what = f"InfiniBand port {name} has {port['rate_gbit']:g} Gbit/s, where others have {usual:g}"
        if what:
            fix = f"its cable and its port on the switch: {look}; or leave it out with NCCL_IB_HCA"
            yield Finding(host=host.name, check="interface", level="yellow", what=what, fix=fix)
