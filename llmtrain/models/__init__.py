"""A Hugging Face model -> this rank's module, and its loss."""

import logging

# transformers and peft import torchao wherever it is installed, which remarks in each process that kernels for other
# products than training's do not load, and torch that it is not written for the newest version.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
