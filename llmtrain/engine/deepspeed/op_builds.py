"""One build of DeepSpeed's ops at a time, and none that waits for the dead."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from llmtrain.base.files import lock_file
from llmtrain.base.log import warn
from llmtrain.cluster.doctor.probe import BUILD_LOCK, users_of


@contextlib.contextmanager
def op_build_lock() -> Iterator[None]:
    """Hold the right to build ops in torch's folder of extensions, on this host and on others that share the folder.

    torch guards a build with a file that a killed process leaves behind; every later run then waits for ever, in
    silence. Our lock ends with its process: whoever has it knows that nobody else of ours builds. It is on a file, not
    on the folder, so that a home that many hosts share has one build. A torch lock file that is still there is that of
    a program which does not know our lock (another DeepSpeed script), which has it open, or stale.
    """
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory("cpu_adam", verbose=False))
    handle = lock_file(folder.parent / BUILD_LOCK)
    try:
        stale = folder / "lock"
        with contextlib.suppress(FileNotFoundError):  # the other build is done
            if users := users_of(str(stale)):
                warn(f"waiting for the build of process {users[0]}, which has the lock {stale}")
            else:
                stale.unlink()
                warn(f"removed {stale}: a killed process left it behind")
        yield
    finally:
        os.close(handle)
