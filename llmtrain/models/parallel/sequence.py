"""Sequence parallelism (Ulysses, arXiv 2309.14509): ranks share each row, and within attention they share its heads.

Rank s has the columns [s T / S, (s + 1) T / S) of every row, except within attention. There an all-to-all gives it all
T tokens for its share of the heads, the model's own attention function runs on them with the mask of complete rows, and
another all-to-all returns the result to the ranks with the columns.

DeepSpeed's wrapper for transformers (UlyssesSPAttentionHF, 0.19.8) drops the mask, so with sdpa sliding windows and
document borders are silently lost. It also refuses eager attention (soft caps), and serves only one model a process.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.sequence.layer import register_all_to_all_group
from torch import Tensor

from llmtrain.base.errors import ModelError
from llmtrain.base.units import divisors
from llmtrain.models.language import LanguageModel, documents_in_rows
from llmtrain.models.neftune import text_lengths
from llmtrain.models.parallel.deepspeed_private import all_to_all
from llmtrain.models.structure.calls import attention_seen
from llmtrain.models.structure.small_copy import probe_copy, run_decoder
from llmtrain.models.transformers_private import masks_of_whole_rows, stand_before_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SequenceLanguageModel(LanguageModel):
    """Each rank of the group gets the same complete rows, derives lengths and documents from them for the masks, and
    then computes only its columns."""

    def __init__(self, hf: PreTrainedModel, chunk: int, group: Any) -> None:
        super().__init__(hf, chunk)
        self._exchange = Exchange(group)
        self.head.shared_rows = self._exchange
        exchange_heads(hf, self._exchange)

    def hidden(self, inputs: Tensor, positions: Tensor | None) -> Tensor:
        """Return the hidden state of this rank's columns, [B, t, H]. `inputs`: complete rows [B, T]."""
        rows, length = inputs.shape
        assert length % self._exchange.degree == 0, (length, self._exchange.degree)
        places = torch.arange(length, device=inputs.device).expand(rows, -1) if positions is None else positions
        self._exchange.places_BT = places
        if self.noise is not None:
            self.noise.lengths_BT = self.head.own(text_lengths(inputs, positions))
        with documents_in_rows(positions), masks_of_whole_rows(places):
            return self.decoded(input_ids=self.head.own(inputs), position_ids=self.head.own(places))

    def logits(self, inputs: Tensor) -> Tensor:
        with self._exchange.suspended():
            return super().logits(inputs)


class Exchange:
    """Exchanges t = T / S columns of all H heads for all T columns of h = H / S heads, and back, among S ranks."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.degree = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.active = True
        self.places_BT: Tensor | None = None
        """Positions of complete rows, from which some attention functions derive the documents."""
        register_all_to_all_group(group)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which each rank's model computes complete rows by itself."""
        self.active = False
        try:
            yield
        finally:
            self.active = True

    def of_all(self, shard: Tensor) -> Tensor:
        return all_to_all(self.group, shard.expand(self.degree, *shard.shape).contiguous())

    def turned(self, x: Tensor) -> Tensor:
        """Divide the second dimension among the ranks, and gather the third: [B, H, t, D] -> [B, h, T, D] for heads, or
        back, [B, T, h, D] -> [B, t, H, D]."""
        rows, shared, gathered, size = x.shape
        parts = x.view(rows, self.degree, shared // self.degree, gathered, size).transpose(0, 1)
        came = all_to_all(self.group, parts)  # [S, ...], by the rank that had the part of the third dimension
        return came.permute(1, 2, 0, 3, 4).reshape(rows, shared // self.degree, self.degree * gathered, size)

    def attend(self, inner: Callable[..., Any], module: Any, qkv: tuple[Tensor, ...], *args: Any, **kwargs: Any) -> Any:
        """Run transformers' attention function `inner` on this rank's heads. Raises ModelError if S does not divide
        them."""
        query, key, value = qkv
        if query.shape[1] % self.degree:
            rule = f"its {query.shape[1]} attention heads cannot be shared by {self.degree} ranks"
            raise ModelError(f"model: {rule}; {_KEY} can be {divisors(query.shape[1])}.")
        # Too few key/value heads are repeated until each rank has its own.
        copies = self.degree // math.gcd(key.shape[1], self.degree)
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        query, key, value = self.turned(query), self.turned(key), self.turned(value)
        if "position_ids" in kwargs:
            kwargs["position_ids"] = self.places_BT
        with _groups_of(module, query.shape[1] // key.shape[1]):
            output, weights = inner(module, query, key, value, *args, **kwargs)
        return self.turned(output).contiguous(), weights  # some families view it


@contextlib.contextmanager
def _groups_of(attention: Any, groups: int) -> Iterator[None]:
    """A context that sets the number of query heads per key head in the module, where attention functions read it."""
    before = getattr(attention, "num_key_value_groups", None)
    if before in (None, groups):
        yield
        return
    attention.num_key_value_groups = groups
    try:
        yield
    finally:
        attention.num_key_value_groups = before


def exchange_heads(hf: PreTrainedModel, exchange: Exchange) -> None:
    """Send every attention of the model through the exchange. Raises ModelError as `check_attention`."""
    check_attention(hf)
    stand_before_attention(_attend)
    module: Any
    for module in hf.modules():
        module.llmtrain_exchange = exchange
        bare = not any(True for _ in module.parameters())
        if bare and "position_ids" in inspect.signature(module.forward).parameters:
            _see_the_last_position(module, exchange)


def _attend(
    inner: Callable[..., Any], module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Call attention through the module's exchange; modules without an exchange call transformers' function."""
    exchange: Exchange | None = getattr(module, "llmtrain_exchange", None)
    if exchange is None or not exchange.active:
        return inner(module, query, key, value, *args, **kwargs)
    return exchange.attend(inner, module, (query, key, value), *args, **kwargs)


def _see_the_last_position(rotary: Any, exchange: Exchange) -> None:
    """Show rotary embeddings the length of the complete row: some kinds (longrope, dynamic) use other angles for long
    rows. They take the length from the largest position, so each rank adds the row's last position to its own."""
    forward_of_rotary = rotary.forward

    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not exchange.active or exchange.places_BT is None:
            return forward_of_rotary(x, position_ids, *args, **kwargs)
        last_B1 = exchange.places_BT.amax(1, keepdim=True)  # positions are [B, T], or [axes, B, T] (cohere_compass)
        longer = torch.cat([position_ids, last_B1.expand(*position_ids.shape[:-1], 1)], -1)
        angles = forward_of_rotary(x, longer, *args, **kwargs)
        cut = lambda part: part[..., :-1, :]  # noqa: E731
        return cut(angles) if isinstance(angles, Tensor) else tuple(map(cut, angles))  # deepseek_v2: one, complex

    rotary.forward = forward


def check_attention(hf: PreTrainedModel) -> None:
    """Prove that tokens of the model affect each other only through transformers' attention functions. A small copy
    runs with an attention that returns each token's own value: then no token may depend on another. Raises
    ModelError."""
    name = type(hf).__name__
    if "position_ids" not in inspect.signature(hf.base_model.forward).parameters:
        raise ModelError(f"model: {name} takes no positions, so ranks cannot share a sequence; set {_KEY} to 1.")
    small = probe_copy(hf)
    ids = torch.arange(12).unsqueeze(0) + 3
    other = ids.clone()
    other[0, 5] = 2
    with torch.no_grad(), attention_seen(small) as calls:
        with contextlib.suppress(ModelError):  # attention code of its own may need another mask, like Falcon's
            run_decoder(small, ids)
        if not calls:
            raise ModelError(
                f"model: the attention of {name} is code of its own, not transformers' attention interface, so its "
                f"heads cannot be shared; set {_KEY} to 1."
            )
        for path in {call.path for call in calls}:
            for parameter, _ in small.get_submodule(path).named_parameters(recurse=False):
                raise ModelError(
                    f"model: the attention of {name} has a parameter of its own ({parameter}), with a value for each "
                    f"head; ranks that share heads would need their parts of it. Set {_KEY} to 1."
                )

    def own_value(query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # no token affects another
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous()

    with torch.no_grad(), attention_seen(small, compute=own_value):
        try:
            one, two = (run_decoder(small, tokens) for tokens in (ids, other))
        except ModelError as error:  # the model may use attention in other ways
            watched = "It was run with a replaced attention, as on ranks that share sequences"
            raise ModelError(f"{error} {watched}; set {_KEY} to 1.") from error
    # Not compared bit for bit: a token that goes to another expert changes the shapes, so the rounding, of products.
    felt = ~torch.isclose(one, two, rtol=1e-3, atol=1e-4).all(-1)[0]
    felt[5] = False
    if felt.any():
        raise ModelError(
            f"model: in {name} tokens also reach each other outside attention (a convolution, a recurrent state), "
            f"which ranks that share a sequence would lose. Set {_KEY} to 1."
        )


_KEY = "sequence_parallel_size"
