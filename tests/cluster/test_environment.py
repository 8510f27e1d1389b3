"""Variables, secrets and arguments through DeepSpeed's launcher, pdsh, sshd and two hosts' shells, byte for byte."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.helpers.warm import WarmCommands
from tools.lab.lab import Lab

SECRET = "canary-5b2e90d1"
LAUNCH = """
import json, os, subprocess, sys
from pathlib import Path
from llmtrain.base.rank import messages
from llmtrain.cluster.hosts.variables import deepspeed_env, deliver, for_pdsh, remove, travelling
given = json.load(sys.stdin)
folder = Path(given["folder"])
os.chdir(folder)
travel = travelling({}, given["variables"])
path = deliver(given["hosts"], travel.private)
(folder / "variables").write_text(deepspeed_env({**travel.open, messages.SECRETS: path}))
words = ["--hostfile", "hosts", "--no_ssh_check", "--master_addr", "10.77.0.1", "--no_python", "--no_local_rank"]
done = subprocess.run(
    [sys.executable, "-m", "deepspeed.launcher.runner", *words, str(folder / "rank"), *map(for_pdsh, given["words"])],
    env={**os.environ, "DS_ENV_FILE": str(folder / "variables")},
)
print(json.dumps({"private": list(travel.private), "left": remove(given["hosts"], path), "code": done.returncode}))
"""
# On each host: what arrived, and the command lines of everything that runs there meanwhile.
RANK = f"""#!{sys.executable}
import json, os, psutil, sys
from pathlib import Path
from llmtrain.base.rank.launcher import load_secrets
load_secrets()
argv = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]
told = {{"environ": dict(os.environ), "argv": sys.argv[1:], "processes": argv}}
Path(__file__).with_name("rank-" + os.environ["RANK"]).write_text(json.dumps(told))
"""
PAYLOADS = (
    *(
        "$(touch canary)",
        "`touch canary`",
        "; touch canary;",
        "&& touch canary",
        "$HOME",
        "${PATH}",
        "a b",
        "  a  ",
        "'",
    ),
    *(
        '"',
        "\\",
        "a'b\"c`d$e",
        "%h%n%u%%",
        "~",
        "*",
        "{a,b}",
        "!",
        "#",
        " # c",
        "=",
        "é",
        "日本",
        "\x1b[0m",
        "x" * 3000,
    ),
)


def test_every_byte_arrives_and_no_secret_is_seen(lab3: Lab, tmp_path: Path, warm: WarmCommands) -> None:
    every = [bytes([b]).decode("utf-8", "surrogateescape") for b in range(1, 256)]
    variables = {f"V{i}": value for i, value in enumerate([*PAYLOADS, *(f"x{c}y" for c in every)])}
    words = ["--flag", *PAYLOADS, *every[:127]]
    (tmp_path / "rank").write_text(RANK)
    (tmp_path / "rank").chmod(0o755)
    (tmp_path / "hosts").write_text("node-1 slots=1\nnode-2 slots=1\n")
    variables |= {"WANDB_API_KEY": SECRET, "HF_TOKEN": f"two\nlines {SECRET}"}
    given = {"folder": str(tmp_path), "hosts": ["node-1", "node-2"], "words": words, "variables": variables}
    done = lab3.hosts[0].run([warm.hosts / "python", "-c", LAUNCH], input=json.dumps(given), timeout_s=200)
    assert done.returncode == 0, done.stderr
    end = json.loads(done.stdout.splitlines()[-1])
    assert end["code"] == 0 and end["left"] == [], done.stdout + done.stderr
    assert {"WANDB_API_KEY", "HF_TOKEN"} < set(end["private"]) < set(variables)
    for rank in (0, 1):
        told = json.loads((tmp_path / f"rank-{rank}").read_text())
        assert told["argv"] == words
        assert {name: told["environ"].get(name) for name in variables} == variables
        assert any("deepspeed.launcher.launch" in words for words in told["processes"]), "no command line was seen"
        assert SECRET not in json.dumps(told["processes"])
    assert SECRET not in done.stdout + done.stderr
    assert not list(tmp_path.rglob("canary")) and not (lab3.hosts[1].home / "canary").exists(), "something ran"
    assert all(not list((host.home / ".llmtrain/secrets").iterdir()) for host in lab3.hosts[:2])
