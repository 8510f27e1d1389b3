"""Shared fixtures: rank pools and one small prepared data folder for the whole session."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

# What somebody has set or logged in to must not change a test. Names of network cards stay: a machine may need them.
_OF_A_USER = (
    "WANDB_",
    "HF_",
    "HUGGING",
    "TRANSFORMERS_",
    "MLFLOW_",
    "AWS_",
    "LLMTRAIN_",
    "OMP_",
    "MASTER_",
    "LOCAL_",
    "RANK",
    "WORLD_SIZE",
    "SLURM_",
    "TORCHDYNAMO_",
    "TORCH_COMPILE",
    "PYTORCH_",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
)
for _name in [name for name in os.environ if name.upper().startswith(_OF_A_USER)]:
    if _name != "LLMTRAIN_GPU_TESTS_ON_CPU":  # it is asked of the tests
        del os.environ[_name]
_HOME = tempfile.mkdtemp(prefix="llmtrain-tests-")
os.environ.update(
    NETRC=os.devnull, WANDB_CONFIG_DIR=_HOME, HF_TOKEN_PATH=os.devnull, LLMTRAIN_CACHE=_HOME, WANDB_MODE="disabled"
)  # where no test asks for it


from tests.helpers import targets  # noqa: E402
from tests.helpers.ranks import THREADS, RankPool  # noqa: E402  # it reads the environment

if importlib.util.find_spec("hypothesis") is not None:  # tests/gpu needs none, and a rented machine may have none
    from hypothesis import HealthCheck, settings

    # A busy machine takes a second for what a quiet one draws in milliseconds.
    settings.register_profile("tests", suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("tests")

# A shell's background job ignores it, and so would all processes that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_FOR_RANKS = ("GLOO_", "NCCL_", "MASTER_", "LOCAL_", "RANK", "WORLD_SIZE")
_BEFORE = {name: value for name, value in os.environ.items() if name.startswith(_FOR_RANKS)}


_GPU = Path(__file__).parent / "gpu"


def pytest_configure(config: pytest.Config) -> None:
    """On the CPU, whatever this machine has: expectations are exact, and ranks outnumber GPUs. tests/gpu runs alone."""
    paths = [Path(str(arg).partition("::")[0]).resolve() for arg in config.args]
    if not paths or not all(path.is_relative_to(_GPU) for path in paths):
        os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")


def pytest_unconfigure() -> None:
    shutil.rmtree(_HOME, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each test has the marker of its make target. A row for a folder that is collected must fit a test."""
    targets.mark(items)
    if session.testsfailed or any(config.getoption(name, None) for name in ("lf", "ignore", "ignore_glob")):
        return  # modules are missing
    folders = [Path(arg).resolve() for arg in config.args if Path(arg).is_dir()]
    if len(folders) == len(config.args) and (rows := targets.unused(items, folders)):
        raise pytest.UsageError(f"tests/targets.txt has rows that no test fits: {rows}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """No module that a test imports sets what the ranks of every later test inherit: one had sent the lab's to `lo`."""
    now = {name: value for name, value in os.environ.items() if name.startswith(_FOR_RANKS)}
    if now != _BEFORE:
        raise pytest.UsageError(f"a test module changed the environment while it was imported: {now} was {_BEFORE}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs an optional package. Torch's threads here wait by spinning, which takes ten times one's time."""
    needed = {name for marker in item.iter_markers("needs") for name in marker.args}
    if missing := [name for name in sorted(needed) if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)}: not installed")
    if (torch := sys.modules.get("torch")) is not None and torch.get_num_threads() > THREADS:
        torch.set_num_threads(THREADS)


_BUILD = """
from llmtrain.engine.deepspeed.optimizers import op_build_lock
with op_build_lock():
    from deepspeed.ops.op_builder import CPUAdamBuilder
    CPUAdamBuilder().load(verbose=False)
"""
_MANY = 100


@pytest.fixture(scope="session", autouse=True)
def _cpu_adam_is_built(request: pytest.FixtureRequest) -> Iterator[None]:
    """DeepSpeed's CPUAdam takes one to four minutes to compile: for `make test-all`, while other tests run."""
    ours = [item for item in request.session.items if "tests/ranks/" in item.nodeid]
    if sum(item.get_closest_marker("more") is not None for item in ours) < _MANY:
        yield
        return
    argv = [sys.executable, "-c", _BUILD]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True) as build:
        yield
        with contextlib.suppress(psutil.Error):  # ninja gives each compiler a process group of its own
            for process in [*psutil.Process(build.pid).children(recursive=True), build]:
                process.kill()


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], RankPool]]:
    """pools(n): n ranks, started once for all files."""
    made: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        return made.setdefault(world_size, RankPool(world_size))

    yield pool
    for each in made.values():
        each.close()


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A prepared folder: vocabulary 512, documents of unequal length."""
    from tests.helpers.training import prepared_data

    return prepared_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def other_data(tmp_path_factory: pytest.TempPathFactory, small_data: str) -> str:
    """Another one, with the same tokenizer."""
    from tests.helpers.training import prepared_data

    return prepared_data(tmp_path_factory.mktemp("other"), like=small_data)
