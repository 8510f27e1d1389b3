"""No configuration can name code to import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.config.schema import schema
from tests.helpers.config_workplace import DS, write

pytestmark = pytest.mark.long

SECTIONS = sorted({key.split(".")[0] for key in schema() if "." in key})
EVIL = '{"class_path": "canary.Evil", "init_args": {}}'

# One process tries everything: each attempt must fail with exit code 2, and the canary must stay unimported.
ATTEMPT = """
import json, pathlib, sys
from llmtrain.cli import main
attempts = json.loads(pathlib.Path("attempts.json").read_text())
for name, run, ds, argv in attempts:
    pathlib.Path("run.yaml").write_text(run)
    pathlib.Path("ds.json").write_text(ds)
    try:
        code = main(["config", "check", "run.yaml", *argv])
    finally:
        if "canary" in sys.modules or pathlib.Path("sung").exists():
            sys.exit(f"the canary was imported by: {name}")
    if code != 2:
        sys.exit(f"accepted: {name}")
import canary  # from the same folder it can be imported
"""


def attempts(tmp_path: Path) -> list[tuple[str, str, str, list[str]]]:
    write(tmp_path)
    run, ds = (tmp_path / "run.yaml").read_text(), json.dumps(DS)
    evil_json = json.dumps({**DS, "optimizer": {"type": "canary.Evil", "params": {}}})
    found = [
        ("JSON optimizer type", run, evil_json, []),
        ("JSON class_path", run, json.dumps({**DS, "class_path": "canary.Evil"}), []),
        ("top-level class_path", f"{run}\nclass_path: canary.Evil\n", ds, []),
        ("tag", f"{run}\nresume: !!python/object/apply:canary.Evil []\n", ds, []),
    ]
    for section in SECTIONS:
        found.append((f"--{section}", run, ds, [f"--{section}", "canary.Evil"]))
        found.append((f"--{section}.class_path", run, ds, [f"--{section}.class_path", "canary.Evil"]))
        found.append((f"YAML {section} map", f"deepspeed: ds.json\n{section}: {EVIL}\n", ds, []))
        found.append((f"YAML {section} text", f"deepspeed: ds.json\n{section}: canary.Evil\n", ds, []))
    for key in ("class_path", "auto_map", "_attn_implementation_internal", "trust_remote_code", "rope.class_path"):
        found.append((f"--model.config.{key}", run, ds, [f"--model.config.{key}", "canary.Evil"]))
    found.append(("nested in model.config", run, ds, ["--model.config.layers", f"[{EVIL}]"]))
    return found


@pytest.mark.timeout(120)
def test_nothing_imports_the_canary(tmp_path: Path) -> None:
    (tmp_path / "canary.py").write_text('open("sung", "w").close()\nclass Evil:\n    pass\n')
    tries = attempts(tmp_path)
    assert len(tries) > 50
    (tmp_path / "attempts.json").write_text(json.dumps(tries))
    done = subprocess.run([sys.executable, "-c", ATTEMPT], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "sung").exists()
    assert "Traceback" not in done.stderr
