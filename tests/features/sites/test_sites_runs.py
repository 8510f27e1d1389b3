"""Several launches that train one model: as users start them, with torchft's coordinator."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.checkpoint.format import complete_checkpoints
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.config.run import DataConfig
from llmtrain.data.where import sequences, spans
from llmtrain.features.sites.membership import heard_at, heard_on
from tests.features.sites.simulated_sites import loss_of, simulated
from tests.helpers import forked
from tests.helpers.launching import (
    REPO,
    TINY,
    environment,
    finish,
    free_port,
    kill_tree,
    losses,
    rows,
    wait_for_step,
    write_run,
)
from tests.helpers.warm import WarmCommands

pytestmark = pytest.mark.needs("torchft")

os.environ.setdefault("RUST_LOG", "warn")  # torchft's coordinator tells of every meeting

SYNC = ("--sites.sync_every", "4", "--sites.max_alone_steps", "8", "--sites.pace", "equal")


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    """HOST:PORT."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=3000, quorum_tick_ms=20, heartbeat_timeout_ms=3000
    )
    yield f"127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


def recipe(folder: Path, data: str, stage: int = 1, **sections: Any) -> Path:
    train = {"global_batch": 4, "max_steps": 12}
    return write_run(folder, data, {"zero_optimization": {"stage": stage}}, train, **sections)


def start(file: Path, coordinator: str, *more: str, ranks: int = 1, before=None) -> forked.Launch:
    named = ("--sites.name", file.parent.name, "--sites.coordinator", coordinator)
    micro = ("--train.micro_batch", str(4 // ranks // 2))
    return forked.Launch(file, *named, *SYNC, *micro, *more, world_size=ranks, before=before)


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint."""
    reader = CheckpointReader(complete_checkpoints(folder / "run/checkpoints")[0])
    names = reader.order()
    found = {name: reader.read(name, 0, torch.Size(reader.shape(name)).numel()).clone() for name in names}
    reader.close()
    return found


def far(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, float]:
    """(largest, root mean square) difference of two models' parameters."""
    assert a.keys() == b.keys()
    off = torch.cat([(a[name].flatten() - b[name].flatten()).double() for name in a])
    return float(off.abs().max()), float(off.square().mean().sqrt())


def synchronised(folder: Path, kind: str = "synchronise") -> list[dict]:
    return [event for event in rows(folder / "run", "events.jsonl") if event["kind"] == kind]


def test_two_sites_train_what_the_definition_says(coordinator, small_data, tmp_path):
    """One rank at ZeRO 1 and two at ZeRO 3, which cut the model elsewhere. DiLoCo: with other hardware, below.

    Both sites end with the same bits. Plain PyTorch sums gradients in another order, which changes their last digits;
    AdamW's division makes that a part of a step (3e-3) where a gradient is nearly 0, and nothing elsewhere. So: no
    element is off by more than a thirtieth of one step, the mean by less than 1e-6. The other method's outer step, a
    wrong one, is 100 times beyond both.
    """
    both = ("--sites.start_sites", "2", "--sites.method", "local_sgd")
    a = start(recipe(tmp_path / "A", small_data), coordinator, *both)
    b = start(recipe(tmp_path / "B", small_data, 3), coordinator, *both, ranks=2)
    assert a.wait(90) == [0] and b.wait(30) == [0, 0], a.output() + b.output()
    got = parameters(tmp_path / "A")
    assert far(got, parameters(tmp_path / "B"))[0] == 0
    setting = {"sites": 2, "batch": 4, "steps": 12, "sync_every": 4, "lr": 3e-3}
    data = DataConfig(path=small_data, sequence_length=32)
    right = far(got, simulated(TINY, data, **setting, outer_lr=None))
    wrong = far(got, simulated(TINY, data, **setting, outer_lr=0.7, outer_momentum=0.9))
    assert right[0] < 1e-4 and right[1] < 1e-6 and wrong[0] > 1e-2 and wrong[1] > 1e-4, (right, wrong)
    events = synchronised(tmp_path / "A")
    assert [event["used"] for event in events] == [[], ["A", "B"], ["A", "B"], ["A", "B"]]
    count = sum(each.numel() for each in got.values())
    assert [event["received_bytes"] for event in events] == [0, *[4 * count] * 3]  # every element once a round
    seen = [row for row in rows(tmp_path / "A" / "run") if "sites/outer_step_norm" in row]
    assert [row["step"] for row in seen] == [0, 4, 8, 12] and {row["sites/participants"] for row in seen} == {2}
    assert [row["sites/received_bytes"] for row in seen] == [event["received_bytes"] for event in events]
    assert [row["sites/sent_bytes"] for row in seen] == [
        event["received_bytes"] for event in synchronised(tmp_path / "B")
    ]
    assert all(row["sites/outer_step_norm"] > 0 for row in seen[1:])
    read = [
        index
        for site in "AB"
        for span in spans(tmp_path / site / "run")
        for step in range(span.after + 1, (span.until or 12) + 1)
        for index in sequences(span, step, None)
    ]  # what `data where` says: each of the sequences that were dealt, at one site
    assert sorted(read) == list(range(2 * 12 * 4))
    alone, several = ([row["comm_share"] for row in rows(tmp_path / at / "run") if "comm_share" in row] for at in "AB")
    assert alone == [] and several and all(0 < share < 1 for share in several)


def test_sites_go_on_with_other_hardware_and_one_without_the_other(coordinator, small_data, tmp_path):
    """Two rounds; two more after both have changed ranks and ZeRO stage; then a run without sites.

    The common parameters, the outer momentum and the data go on: the definition's 12 steps, to the bound of
    `test_two_sites_train_what_the_definition_says`. Without the momentum they would be 100 times as far from it.
    """
    both = ("--sites.start_sites", "2", "--train.max_steps")
    files = [recipe(tmp_path / name, small_data, stage) for name, stage in (("A", 1), ("B", 2))]
    first = [start(files[0], coordinator, *both, "8", ranks=1), start(files[1], coordinator, *both, "8", ranks=2)]
    assert [launch.wait(90) for launch in first] == [[0], [0, 0]], first[0].output() + first[1].output()
    manifest = json.loads((complete_checkpoints(tmp_path / "B/run/checkpoints")[0] / "manifest.json").read_text())
    shapes = manifest["manifest"]["tensors"].values()
    held = [piece for file in manifest["manifest"]["files"].values() for piece in file.get("pieces", [])]
    count = sum(int(torch.Size(shape).numel()) for shape in shapes)
    for kind in ("outer.common", "outer.momentum"):
        assert sum(piece[3] for piece in held if piece[0] == kind) == count  # once
    (tmp_path / "A/ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    then = [start(files[0], coordinator, *both, "12", ranks=2), start(files[1], coordinator, *both, "12", ranks=1)]
    assert [launch.wait(90) for launch in then] == [[0, 0], [0]], then[0].output() + then[1].output()
    got = parameters(tmp_path / "A")
    setting = {"sites": 2, "batch": 4, "steps": 12, "sync_every": 4, "lr": 3e-3}
    data = DataConfig(path=small_data, sequence_length=32)
    largest, mean = far(got, simulated(TINY, data, **setting, outer_lr=0.7, outer_momentum=0.9))
    assert far(got, parameters(tmp_path / "B"))[0] == 0 and largest < 1e-4 and mean < 1e-6, (largest, mean)
    forked.train(files[0], "--train.micro_batch", "2", "--train.max_steps", "13", world_size=1)
    assert max(losses(tmp_path / "A/run")) == 13


def test_a_site_alone_trains_as_without_sites(coordinator, small_data, tmp_path):
    """With an outer learning rate of 1 and no momentum the outer step is the inner one, to the last bit."""
    outer = ("--sites.outer_lr", "1.0", "--sites.outer_momentum", "0.0")
    launch = start(recipe(tmp_path / "alone", small_data), coordinator, *outer)
    assert launch.wait(60) == [0], launch.output()
    forked.train(recipe(tmp_path / "plain", small_data), "--train.micro_batch", "2", world_size=1)
    assert losses(tmp_path / "alone/run") == losses(tmp_path / "plain/run")
    assert far(parameters(tmp_path / "alone"), parameters(tmp_path / "plain"))[0] == 0
    assert len(synchronised(tmp_path / "alone")) == 4


def test_the_commands_of_the_page(small_data, tmp_path, warm):
    """The real launcher and coordinator; the addresses, ports, run folders and the number of steps are the test's."""
    blocks = re.findall(r"^```bash\n(.*?)\n```", (REPO / "docs/sites.md").read_text(), flags=re.M | re.S)
    port = free_port()
    meeting, sites, status = (re.sub(r"10\.8\.0\.1:\d+", f"127.0.0.1:{port}", each) for each in blocks[:3])
    recipe(tmp_path / "site", small_data).rename(tmp_path / "RUN.yaml")
    (tmp_path / "launch").symlink_to(REPO / "launch")
    env = with_torchft(warm)
    jobs = [start_shell(meeting, tmp_path, env)]
    try:
        for line in sites.splitlines():
            name = re.search(r"hosts\.(\w+)", line)[1]
            (tmp_path / f"hosts.{name}").write_text("localhost slots=1\n")
            line = line.replace(
                "--hostfile", f"--no_ssh_check --master_addr 127.0.0.1 --master_port {free_port()} --hostfile"
            )
            both = f"--train.run_dir {name} --sites.start_sites 2 --sites.sync_every 4 --train.micro_batch 2"
            jobs.append(start_shell(f"{line} {both}", tmp_path, env))
        for job in jobs[1:]:
            code, output = finish(job)
            assert code == 0, output
        code, output = finish(start_shell(status, tmp_path, env))
        assert code == 0 and re.search(r"^north .*\nsouth ", output, re.M), output
        jobs[0].send_signal(signal.SIGTERM)
        code, output = finish(jobs[0])
        assert code == 0 and re.search(r"listens on \S+:\d+", output), output
    finally:
        for job in jobs:
            kill_tree(job)
    used = [row["used"] for row in rows(tmp_path / "north", "events.jsonl") if row["kind"] == "synchronise"]
    assert used == [[], *[["north", "south"]] * 3]


def test_a_launch_whose_site_waits_for_the_others_ends_at_sigterm(coordinator, small_data, tmp_path, warm):
    """Two ranks, started and watched by `llmtrain launch`; the site has joined no round."""
    file = recipe(tmp_path / "waits", small_data)
    (file.parent / "hosts").write_text("localhost slots=2\n")
    words = f"--sites.name waits --sites.coordinator {coordinator} --sites.start_sites 2 --train.micro_batch 1"
    job = start_shell(f"llmtrain launch --hostfile hosts -- {file} {words}", file.parent, with_torchft(warm))
    try:
        until_s = time.monotonic() + 120
        while not any(each.site == "waits" for each in heard_at(coordinator)):
            assert job.poll() is None and time.monotonic() < until_s
            time.sleep(0.2)
        job.send_signal(signal.SIGTERM)
        code, output = finish(job, 60)
    finally:
        kill_tree(job)
    assert code == 75 and "at step 0" in output, output
    assert not losses(file.parent / "run") and not list(file.parent.glob("run/checkpoints/*"))


def with_torchft(warm: WarmCommands) -> dict[str, str]:
    """`make train` does not install it."""
    found = importlib.util.find_spec("torchft")
    assert found is not None and found.origin is not None
    return warm.environment(PYTHONPATH=str(Path(found.origin).parents[1]))


def start_shell(command: str, folder: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "-ec", f"exec {command}"],
        cwd=folder,
        env=env or environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def die_while_sending(_: int) -> None:
    """In the third synchronisation, after half of what the other site wants."""
    from llmtrain.features.sites import transport

    def send(line: transport._Line, header: dict, parts: Iterable) -> None:
        line.send_header(header)
        line.send(next(iter(parts)).tobytes()[: header["bytes"] // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    usual = transport.Server._send

    def server_send(self: transport.Server, line: transport._Line, header: dict, parts: Iterable) -> None:
        late = any(round_ == 3 for round_, _ in self._arrays.values())
        send(line, header, parts) if late and header["bytes"] else usual(self, line, header, parts)

    transport.Server._send = server_send  # type: ignore[method-assign]


def test_a_site_that_dies_in_the_middle_of_a_synchronisation_holds_nobody_up(coordinator, small_data, tmp_path):
    both = ("--sites.start_sites", "2", "--sites.timeout_s", "30")
    a = start(recipe(tmp_path / "A", small_data), coordinator, *both, "--train.max_steps", "20")
    b = start(recipe(tmp_path / "B", small_data), coordinator, *both, before=die_while_sending)
    assert a.wait(90) == [0], a.output()
    assert b.wait(1) == [-signal.SIGKILL]
    third = synchronised(tmp_path / "A")[3]
    assert third["used"] == ["A"] and [name.partition(":")[0] for name in third["failed"]] == ["B"], third
    assert third["seconds"] < 15 and "site B " in a.output() and "B left" in a.output()
    assert max(losses(tmp_path / "A/run")) == 20


def slow(_: int) -> None:
    """A machine whose steps take three times as long as those of `fast`."""
    _paced(0.3)


def steady(_: int) -> None:
    """A machine that trains 15 steps a second whatever else goes on."""
    _paced(0.07)


def fast(_: int) -> None:
    _paced(0.1)


def _paced(seconds: float) -> None:
    from llmtrain.training.step import Session, Step

    usual = Session.step

    def step(self: Session, *args: Any, **kwargs: Any) -> Step:
        ends_s = time.monotonic() + seconds
        done = usual(self, *args, **kwargs)
        time.sleep(max(0.0, ends_s - time.monotonic()))
        return done

    Session.step = step  # type: ignore[method-assign]


def test_a_slow_site_trains_fewer_steps_and_holds_nobody_up(coordinator, small_data, tmp_path):
    """Sixteen steps of the fast site to about five of the slow one; both end at the same step with the same bits.

    With as many steps each the fast site would stand for two thirds of the time. It may stand for half a step of the
    slow one, by rounding, and for the synchronisation itself.
    """
    more = (
        "--sites.start_sites",
        "2",
        "--sites.method",
        "local_sgd",
        "--sites.pace",
        "measured",
        "--sites.sync_every",
        "16",
        "--train.max_steps",
        "64",
    )
    a = start(recipe(tmp_path / "A", small_data), coordinator, *more, before=fast)
    b = start(recipe(tmp_path / "B", small_data), coordinator, *more, before=slow)
    assert a.wait(90) == [0] and b.wait(30) == [0], a.output() + b.output()
    assert far(parameters(tmp_path / "A"), parameters(tmp_path / "B"))[0] == 0
    assert max(losses(tmp_path / "A/run")) == max(losses(tmp_path / "B/run")) == 64
    first, *rounds = synchronised(tmp_path / "A")[1:]  # nobody has been measured before the first
    assert first["stood_s"] > 2.0 and all(each["used"] == ["A", "B"] for each in (first, *rounds))
    assert [each["stood_s"] < 0.6 for each in rounds] == [True] * 3, rounds
    trained = [step for step in losses(tmp_path / "B/run") if step > 16]
    assert 12 <= len(trained) <= 20, trained
    steps = [rows(tmp_path / name / "run")[-1]["tokens"] // 128 for name in "AB"]
    assert steps == [64, 16 + len(trained)]


def test_a_site_is_killed_and_comes_back_late_and_300_steps_end_with_one_good_model(coordinator, small_data, tmp_path):
    """It takes the others' parameters and step. The loss is at most 1.02 times that of local SGD by its definition, in
    plain PyTorch, of two sites that nothing happens to; that of one site alone would be 1.05 times."""
    steps = (
        "--train.max_steps",
        "300",
        "--train.log_every",
        "10",
        "--sites.sync_every",
        "10",
        "--sites.method",
        "local_sgd",
        "--checkpoint.every_steps",
        "40",
        "--sites.pace",
        "measured",
    )
    a = start(recipe(tmp_path / "A", small_data), coordinator, *steps, "--sites.start_sites", "2", before=steady)
    b = start(recipe(tmp_path / "B", small_data), coordinator, *steps, "--sites.start_sites", "2", before=steady)
    wait_for_step(b, tmp_path / "B/run", 60)
    os.kill(b.ranks[0].pid, signal.SIGKILL)
    assert b.wait(5) == [-signal.SIGKILL]
    b = start(tmp_path / "B/recipe.yaml", coordinator, *steps, before=steady)
    assert a.wait(120) == [0] and b.wait(30) == [0], a.output() + b.output()
    healed = [event["step"] for event in synchronised(tmp_path / "B") if event["healed"]]
    assert len(healed) == 1 and 60 < healed[0] < 300, healed
    assert far(parameters(tmp_path / "A"), parameters(tmp_path / "B"))[0] == 0
    data = DataConfig(path=small_data, sequence_length=32)
    whole = simulated(TINY, data, sites=2, batch=4, steps=300, sync_every=10, lr=3e-3, outer_lr=None)
    got, want = (loss_of(TINY, data, each, 512) for each in (parameters(tmp_path / "A"), whole))
    assert got <= 1.02 * want, (got, want)


def test_sites_that_train_different_models_are_told_what_differs(coordinator, small_data, tmp_path):
    a = start(recipe(tmp_path / "A", small_data), coordinator, "--sites.start_sites", "2")
    other = ("--train.seed", "1", "--model.config.rms_norm_eps", "0.1")
    b = start(recipe(tmp_path / "B", small_data), coordinator, "--sites.start_sites", "2", *other)
    assert a.wait(60) == [2] and b.wait(30) == [2], a.output() + b.output()
    assert re.search("site B .*configuration of the model, train.seed", a.output())


def test_a_coordinator_that_is_not_there_is_named(small_data, tmp_path):
    launch = start(recipe(tmp_path / "A", small_data), "127.0.0.1:9", "--sites.timeout_s", "2")
    assert launch.wait(60) == [2]
    assert "error: sites.coordinator 127.0.0.1:9" in launch.output()
    assert "llmtrain sites coordinator --bind 127.0.0.1:9" in launch.output()


def test_status_reads_what_the_coordinator_shows(coordinator, capsys):
    from datetime import timedelta

    from torchft.coordination import LighthouseClient

    from llmtrain.features.sites.command import main

    client = LighthouseClient(f"http://{coordinator}", timedelta(seconds=5))
    time.sleep(3.5)  # the sites of other tests are silent by now
    client.heartbeat("north:0123abcd", timedelta(seconds=5))
    client.quorum("north:0123abcd", timedelta(seconds=10), step=480, world_size=1, store_address="run", data={})
    client.heartbeat("south:4567cdef", timedelta(seconds=5))
    assert main(["status", "--coordinator", coordinator]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "step 480" in lines["north"] and "ALONE" in lines["north"]
    assert all("there" in lines[site] for site in ("north", "south"))
    assert "took part" in lines["north"] and "took part" not in lines["south"]
    assert heard_on("") == []
