"""Builds this rank's module of a Hugging Face model, and its loss."""

import logging

from llmtrain.base.imports import keep_listing, load_late

# transformers and peft import torchao and bitsandbytes if they are installed. These warn in each process that kernels
# for inference do not load, and torch warns that torchao is not written for the newest version.
for _name in ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops"):
    logging.getLogger(_name).setLevel(logging.ERROR)
# DeepSpeed warns of optimizers that it does not know: these are plugins', and are proved before the run begins.
logging.getLogger("DeepSpeed").addFilter(lambda record: "untested optimizer" not in record.getMessage())
keep_listing()
load_late()
