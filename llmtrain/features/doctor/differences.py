"""Facts of all hosts -> findings about differences. Pure functions, like checks.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmtrain.base import units
from llmtrain.base.rank.interfaces import GLOO, NCCL, named_interfaces
from llmtrain.cluster.hosts.hostfile import Host
from llmtrain.features.doctor.checks import Finding, Level, Survey

# Variables that may differ between hosts: they name a device or a folder of one host.
_OWN = ("NCCL_IB_HCA", "UCX_NET_DEVICES", "TORCH_EXTENSIONS_DIR", "CUDA_VISIBLE_DEVICES", "HF_HOME")
_OWN_ENDS = ("_SOCKET_IFNAME", "_CACHE", "_DIR")


def all_hosts(survey: Survey) -> list[Finding]:
    checks = (_versions, _code, _config, _folders, _environment, _shared, _names, _same_machine, _interfaces)
    return [finding for check in checks for finding in check(survey)]


def odd_ones(values: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return the most common value (on a tie the first host's), and the hosts with another."""
    if not values:
        return None, []
    counted = Counter(values.values())
    most = max(counted.values())
    common = next(value for value in values.values() if counted[value] == most)
    return common, [host for host, value in values.items() if value != common]


def _look(survey: Survey, name: str) -> dict[str, dict[str, Any]]:
    """Return one question's facts by host, for the hosts that have them."""
    return {
        host.name: survey.facts[host.name][name] for host in survey.hosts if name in survey.facts.get(host.name, {})
    }


def _versions(survey: Survey) -> Iterator[Finding]:
    python = {host: facts["version"] for host, facts in _look(survey, "python").items()}
    common, odd = odd_ones(python)
    for host in odd:
        what = f"Python {python[host]}; the others have {common}"
        yield Finding(host=host, check="versions", level="red", what=what, fix=f"on {host}: install Python {common}")
    packages = _look(survey, "packages")
    names = sorted({name for facts in packages.values() for name in facts})
    for name in names:
        common, odd = odd_ones({host: facts.get(name) for host, facts in packages.items()})
        for host in odd:
            has = packages[host].get(name)
            what = f"{name} {has or 'is missing'}; the others have {common or 'none'}"
            fix = f"on {host}: {survey.python} -m pip install {name}=={common}" if common else f"uninstall it on {host}"
            if name in ("cuda", "nccl"):
                fix = f"on {host}: install the same build of torch as on the others"
            yield Finding(host=host, check="versions", level="red", what=what, fix=fix)
        if name in ("torch", "deepspeed", "transformers") and common is None:
            for host in packages.keys() - odd:
                fix = f"on {host}: {survey.python} -m pip install {name}"
                yield Finding(host=host, check="versions", level="red", what=f"{name} is missing", fix=fix)
    drivers = {host: facts["driver"] for host, facts in _look(survey, "devices").items() if facts["count"]}
    common, odd = odd_ones(drivers)
    for host in odd:
        what = f"NVIDIA driver {drivers[host]}; the others have {common}"
        fix = f"on {host}: install driver {common} and reboot"
        yield Finding(host=host, check="versions", level="red", what=what, fix=fix)
    models = {h: tuple(sorted(set(f["names"]))) for h, f in _look(survey, "devices").items() if f["count"]}
    common, odd = odd_ones(models)
    for host in odd:
        what = f"devices {', '.join(models[host])}; the others have {', '.join(common)}"
        fix = "all wait for the slowest kind: leave it out with --exclude, or accept it"
        yield Finding(host=host, check="slots", level="yellow", what=what, fix=fix)


def _code(survey: Survey) -> Iterator[Finding]:
    code = {host: facts for host, facts in _look(survey, "code").items() if facts["folder"]}
    commits, odd = odd_ones({host: facts["commit"] for host, facts in code.items()})
    for host in odd:
        has = code[host]["commit"]
        what = f"git commit {has[:12] if has else 'unknown'}; the others have {commits[:12] if commits else 'none'}"
        fix = f"on {host}: cd {survey.folder} && git fetch && git checkout {commits or ''}"
        yield Finding(host=host, check="code", level="red", what=what, fix=fix)
    _, different = odd_ones({host: facts["sum"] for host, facts in code.items()})
    for host in different:
        if host in odd:
            continue  # its commit is reported above
        what = "the files of llmtrain are not those of the others" + (
            f" ({code[host]['changed']} changed since the commit)" if code[host]["changed"] else ""
        )
        fix = f"copy them: rsync -a {survey.folder}/ {host}:{survey.folder}/"
        yield Finding(host=host, check="code", level="red", what=what, fix=fix)


def _config(survey: Survey) -> Iterator[Finding]:
    config = _look(survey, "config")
    for path in sorted({path for facts in config.values() for path in facts}):
        sums = {host: facts.get(path) for host, facts in config.items()}
        common, odd = odd_ones(sums)
        for host in survey.facts:
            has = sums.get(host)
            fix = f"copy it: scp {path} {host}:{path}"
            if has is not None and has.startswith("cannot"):
                yield Finding(host=host, check="config", level="red", what=f"{path} {has}", fix=fix)
            elif host in odd and not str(common).startswith("cannot"):
                what = f"{path} has another checksum than on the others"
                yield Finding(host=host, check="config", level="red", what=what, fix=fix)


def _folders(survey: Survey) -> Iterator[Finding]:
    looked = _look(survey, "folders")
    for folder in survey.folders:
        facts = {host: by_path[folder.path] for host, by_path in looked.items() if folder.path in by_path}
        # Only hosts with all files are compared; missing files are reported below.
        complete = {host: tuple(about["marks"]) for host, about in facts.items() if not about["lacks"]}
        common, odd = odd_ones(complete)
        what = f"{folder.key}: {folder.path}"
        for host, about in facts.items():
            fix = f"copy it: rsync -aL {folder.path}/ {host}:{folder.path}/     (or mount there what holds it)"
            fix = "put back what is missing, or make the folder again" if survey.alone else fix
            if folder.on_hub:
                problem = "is a folder there, which wins over the repository of that name on the Hub"
                if about["there"]:
                    fix = f"on {host}: give the folder another name, or name it by its full path"
                    yield Finding(host=host, check="files", level="red", what=f"{what} {problem}", fix=fix)
            elif not about["there"]:
                yield Finding(host=host, check="files", level="red", what=f"{what} is not there", fix=fix)
            elif about["lacks"]:
                lacks = f"{what} lacks {_some(about['missing'], about['lacks'])}"
                yield Finding(host=host, check="files", level="red", what=lacks, fix=fix)
            elif about["locked"]:
                problem = f"{what}: {_some(about['locked'])} cannot be read"
                fix = f"on {host}: chmod -R a+rX {folder.path}"
                yield Finding(host=host, check="files", level="red", what=problem, fix=fix)
            elif host in odd:
                groups = [at for at, mark in enumerate(about["marks"]) if mark != common[at]]
                names = [folder.files[-(-at * len(folder.files) // len(common))] for at in groups]
                problem = f"{what} differs from the others': {_some(names)}"
                yield Finding(host=host, check="files", level="red", what=problem, fix=fix)


def _some(names: Sequence[str], count: int | None = None) -> str:
    more = (len(names) if count is None else count) - 2
    first = ", ".join(names[:2]) if more > 0 else " and ".join(names)
    return first + (f" and {units.counted(more, 'more file')}" if more > 0 else "")


def _environment(survey: Survey) -> Iterator[Finding]:
    environment = _look(survey, "environment")
    for name in sorted({name for facts in environment.values() for name in facts}):
        if name in _OWN or name.endswith(_OWN_ENDS):
            continue
        values = {host: facts.get(name) for host, facts in environment.items()}
        common, odd = odd_ones(values)
        for host in odd:
            has = values[host]
            what = f"{name} {'is not set' if has is None else f'is {has!r}'} in ssh's shell; on the others it is "
            what += "not set" if common is None else f"{common!r}"
            fix = f"make ~/.bashrc and ~/.ssh/environment of {host} say the same, or send it with llmtrain launch"
            yield Finding(host=host, check="env", level="yellow", what=what, fix=fix)


def _shared(survey: Survey) -> Iterator[Finding]:
    if survey.own_folders:
        return
    seen = [host for host, sees in survey.nonce.items() if sees]
    missing = [host for host, sees in survey.nonce.items() if not sees]
    first = survey.hosts[0].name
    for host in missing:
        if seen:
            what = f"a file of {first} in {survey.run_dir} is not there, though {len(seen)} others see it: not mounted?"
            fix = f"on {host}: mount the shared file system; findmnt -T {survey.run_dir}"
        else:
            what = f"a file of {first} in {survey.run_dir} is not there: the ranks could not save a checkpoint"
            fix = (
                "put train.run_dir on a file system that all hosts share, or set checkpoint.dir: a folder on each host"
            )
        yield Finding(host=host, check="shared", level="red", what=what, fix=fix)


def addresses_by_interface(facts: Mapping[str, Any]) -> dict[str, list[str]]:
    return {name: about["addresses"] for name, about in facts.get("interfaces", {}).items()}


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


def _names(survey: Survey) -> Iterator[Finding]:
    if survey.alone:
        return  # its ranks meet at 127.0.0.1
    addresses_of = {
        host.name: set().union(*addresses_by_interface(survey.facts.get(host.name, {})).values())
        for host in survey.hosts
    }
    for viewer, names in _look(survey, "names").items():
        unknown = [name for name, address in names["addresses"].items() if address is None]
        if unknown:
            shown = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
            what = f"it does not know the name{'s' * (len(unknown) > 1)} {shown}"
            fix = f"on {viewer}: add to /etc/hosts what `getent hosts {unknown[0]}` says on the others"
            yield Finding(host=viewer, check="name", level="red", what=what, fix=fix)
        for target, address in names["addresses"].items():
            if address is None or not addresses_of.get(target):
                continue
            # A host's own name on loopback, as Debian writes it, is right here; `_interfaces` looks at it.
            right = viewer == target if _is_loopback(address) else address in addresses_of[target]
            if right:
                continue
            has = sorted(a for a in addresses_of[target] if not _is_loopback(a))
            what = f"it resolves {target} to {address}, but {target} has {', '.join(has) or 'no address'}"
            fix = f"on {viewer}: correct the line of {target} in /etc/hosts, or the name server"
            yield Finding(host=viewer, check="name", level="red", what=what, fix=fix)


def _same_machine(survey: Survey) -> Iterator[Finding]:
    seen: dict[tuple[str, ...], str] = {}
    for host in survey.hosts:
        by_interface = addresses_by_interface(survey.facts.get(host.name, {}))
        addresses = [a for addresses in by_interface.values() for a in addresses if not _is_loopback(a)]
        if not addresses:
            continue
        first = seen.setdefault(tuple(sorted(addresses)), host.name)
        if first != host.name:
            what = (
                f"it is the same machine as {first} ({', '.join(addresses)}): their ranks would take the same devices"
            )
            fix = f"remove one of the two names from the hostfile, and give {first} all slots"
            yield Finding(host=host.name, check="name", level="red", what=what, fix=fix)


def right_interfaces(survey: Survey) -> dict[str, str]:
    """Return each host's interface with the address that the others know, if there is one."""
    alone = len(survey.hosts) == 1
    votes: dict[str, Counter[str]] = {host.name: Counter() for host in survey.hosts}
    for viewer, names in _look(survey, "names").items():
        for target, address in names["addresses"].items():
            if address is not None and (alone or target != viewer):
                votes[target][address] += 1
    interfaces = {}
    for host, counted in votes.items():
        by_interface = addresses_by_interface(survey.facts.get(host, {}))
        interface_of = {a: name for name, addresses in by_interface.items() for a in addresses}
        right = [a for a, _ in counted.most_common() if a in interface_of and (alone or not _is_loopback(a))]
        if right:
            interfaces[host] = interface_of[right[0]]
    return interfaces


def gloo_choice(facts: Mapping[str, Any]) -> str | None:
    """Return gloo's interface: GLOO_SOCKET_IFNAME, else the one with the host name's address, else loopback."""
    interfaces = {name: addresses for name, addresses in addresses_by_interface(facts).items() if addresses}
    if setting := facts.get("environment", {}).get(GLOO):
        return next(iter(named_interfaces(GLOO, setting, interfaces) or ()), None)
    address = facts.get("names", {}).get("own")
    for name, addresses in interfaces.items():
        if address in addresses or (address and _is_loopback(address) and any(map(_is_loopback, addresses))):
            return name
    return next((name for name, addresses in interfaces.items() if any(map(_is_loopback, addresses))), None)


def nccl_choice(facts: Mapping[str, Any]) -> str | None:
    """Return the interface of NCCL's sockets: by NCCL_SOCKET_IFNAME, else ib*, else any but docker*, lo and virbr*."""
    names = [n for n, about in facts.get("interfaces", {}).items() if about["addresses"] and about.get("up")]
    if setting := facts.get("environment", {}).get(NCCL):
        return next(iter(named_interfaces(NCCL, setting, names) or ()), None)
    last = ("docker", "lo", "virbr")
    order = [n for n in names if n.startswith("ib")] + [n for n in names if not n.startswith(last)]
    order += [name for word in last for name in names if name.startswith(word)]
    return order[0] if order else None


def _interfaces(survey: Survey) -> Iterator[Finding]:
    if len(survey.hosts) < 2:
        return
    rights = right_interfaces(survey)
    for host in survey.hosts:
        if host.name in rights:
            yield from _chosen(host, survey.facts[host.name], rights[host.name])


def _chosen(host: Host, facts: dict[str, Any], right: str) -> Iterator[Finding]:
    environment, interfaces = facts.get("environment", {}), facts["interfaces"]
    devices = facts.get("devices", {}).get("count", 0)
    choices = [("gloo", GLOO, gloo_choice(facts))]
    if devices or environment.get(NCCL):
        choices.append(("NCCL", NCCL, nccl_choice(facts)))
    for backend, variable, choice in choices:
        setting = environment.get(variable)
        fix = f"remove {variable} from the start files of {host.name}: llmtrain sets {right}; or set it to {right}"
        if setting and choice is None:
            what = (
                f"{variable} is {setting!r}, but it has {', '.join(n for n, a in interfaces.items() if a['addresses'])}"
            )
            yield Finding(host=host.name, check="interface", level="red", what=what, fix=fix)
        elif setting and choice != right:
            level: Level = "red" if any(map(_is_loopback, interfaces[choice]["addresses"])) else "yellow"
            what = f"{variable} makes {backend} take {choice}; the other hosts reach it by {right}"
            yield Finding(host=host.name, check="interface", level=level, what=what, fix=fix)
        elif choice != right and backend == "gloo":
            what = f"gloo alone would take {choice}: {facts['names']['hostname']} is {facts['names']['own']} there; "
            what += f"llmtrain takes {right}, other programs do not"
            fix = f"on {host.name}: give {host.name} the address of {right} in /etc/hosts, or set {variable}={right}"
            yield Finding(host=host.name, check="interface", level="yellow", what=what, fix=fix)
    speed = interfaces[right].get("speed")
    for name, about in interfaces.items():
        faster = speed and about.get("up") and about["addresses"] and (about.get("speed") or 0) > 2 * speed
        if faster:
            what = f"the ranks will communicate over {right} ({speed} Mbit/s), and {name} has {about['speed']} Mbit/s"
            fix = f"write names in the hostfile that lead to {name} if it joins all hosts"
            yield Finding(host=host.name, check="interface", level="yellow", what=what, fix=fix)
