"""What other packages remark in each process, that nobody who trains can act on, is not shown; all else is."""

from __future__ import annotations

import logging

import pytest

import llmtrain.models  # noqa: F401  (it takes the remarks away)

REMARKS = {
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community: no module",
    "torchao": "Failed to load torchao/_C_mxfp8.so",
    "torch.utils._pytree": "Calling register_constant() on Enum subclasses is deprecated",
    "DeepSpeed": "**** You are using ZeRO with an untested optimizer, proceed with caution *****",
}


@pytest.mark.parametrize(("logger", "remark"), REMARKS.items(), ids=REMARKS)
def test_a_remark_is_not_shown_and_what_else_the_package_says_is(logger: str, remark: str) -> None:
    """As `config check` and a run's first lines showed them, on a machine where the packages are installed."""
    shown: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())  # type: ignore[method-assign]
    own = logging.getLogger(logger)
    own.addHandler(handler)
    try:
        own.warning(remark)
        own.error("out of memory")
        if logger == "DeepSpeed":
            own.warning("the loss scale is too small")
    finally:
        own.removeHandler(handler)
    assert shown[0] == "out of memory" and len(shown) == 1 + (logger == "DeepSpeed")
