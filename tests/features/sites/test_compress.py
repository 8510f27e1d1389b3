"""Compressed differences: what a record may lose, what error feedback makes of it, and rounds of sites with them."""

from __future__ import annotations

from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

from llmtrain.features.sites.exchange import Blocks, Feedback, decode, encode
from llmtrain.features.sites.message_formats import BLOCK, FORMATS
from llmtrain.features.sites.outer_methods import SitesConfig
from llmtrain.features.sites.transport import Peer, Server
from llmtrain.storage.region import Region, shard
from tests.features.sites.sites_in_threads import at_once, soon

ALL = ("bf16", "int8", "int4")
RECORD = {"bf16": 512, "int8": 260, "int4": 132}
"""Bytes of 256 elements: 2 each; 1 each and an fp32 scale; half of one each and a scale."""


def numbers(size: int, seed: int = 0) -> np.ndarray:
    """As differences of parameters are: most near 0, some far off, blocks of unequal size; a block of zeros."""
    rng = np.random.default_rng(seed)
    values = rng.standard_t(3, size) * 10.0 ** rng.integers(-9, 3, -(-size // 64)).repeat(64)[:size]
    values[BLOCK : 2 * BLOCK] = 0
    return values.astype(np.float32)


def test_the_section_names_each_format() -> None:
    assert get_args(get_type_hints(SitesConfig)["compress"]) == ("none", *FORMATS)


def loss_of(name: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(what a record has lost, [blocks, BLOCK]; the blocks)."""
    form = FORMATS[name]
    records = encode(form, values)
    assert records.nbytes == RECORD[name] * -(-len(values) // BLOCK) and records.dtype == np.uint8
    decoded = decode(form, records)
    blocks = np.zeros_like(decoded)
    blocks[: len(values)] = values
    return (blocks.astype(np.float64) - decoded).reshape(-1, BLOCK), blocks.reshape(-1, BLOCK).astype(np.float64)


@pytest.mark.parametrize(("name", "most"), [("int8", 127), ("int4", 7)])
def test_rounding_to_steps_is_off_by_half_a_step(name, most) -> None:
    """Of 1/most of the largest element; fp32 adds 2^-23 of that element, for the step and for the product."""
    lost, blocks = loss_of(name, numbers(5000))
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    assert (np.abs(lost) <= largest * (0.5 / most + 2**-23)).all()
    assert np.abs(lost[0]).max() > 0.3 * largest[0] / most  # it does lose something: the bound is the format's


def test_bf16_is_torchs() -> None:
    values = numbers(5000)
    form = FORMATS["bf16"]
    assert (decode(form, encode(form, values))[:5000] == torch.from_numpy(values).bfloat16().float().numpy()).all()


@pytest.mark.parametrize("name", ALL)
def test_what_feedback_delivers_comes_to_the_true_sum(name) -> None:
    """After T rounds the sum is off by the last loss alone: the mean's error falls as 1/T, to 1e-5 for fp32's sums.

    The last loss is bounded. bf16, int8, int4: half a step of the largest of (difference + loss), so
    loss <= largest / (2 most - 1) with most = 128, 127, 7. Without feedback the error of the mean stays where it was.
    """
    form = FORMATS[name]
    rng = np.random.default_rng(3)
    drift = rng.normal(size=2048).astype(np.float32) * 1e-3
    feedback = Feedback(form, 2048)
    errors, truth, sent, alone = {}, np.zeros(2048), np.zeros(2048), np.zeros(2048)
    largest = 0.0
    for number in range(1, 513):
        difference = (drift + rng.normal(size=2048) * 1e-3).astype(np.float32)
        largest = max(largest, np.abs(difference).max())
        _, decoded = feedback.encode(difference, slice(0, 2048))
        feedback.delivered()
        truth, sent = truth + difference, sent + decoded
        alone += decode(form, encode(form, difference))
        errors[number] = np.linalg.norm(sent - truth) / number
        assert np.allclose(truth - sent, feedback.residual, atol=1e-5 * 2e-3 * number)
    most = {"bf16": 128, "int8": 127, "int4": 7}[name]
    assert np.abs(feedback.residual).max() <= largest / (2 * most - 1) * 1.001
    without = np.linalg.norm(alone - truth) / 512
    assert errors[512] < errors[32] / 8 and errors[512] < without / 5, (errors[32], errors[512], without)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(name, wrong) -> None:
    """So that the others see it, and leave that site out."""
    values = numbers(1000)
    values[700] = wrong
    form = FORMATS[name]
    assert form is not None and not np.isfinite(decode(form, encode(form, values))).all()


@pytest.mark.parametrize("name", ALL)
def test_any_bytes_are_some_numbers(name) -> None:
    form = FORMATS[name]
    noise = np.random.default_rng(0).integers(0, 256, 300 * form.record).astype(np.uint8)
    assert decode(form, noise).shape == (300 * BLOCK,)


@pytest.mark.parametrize("name", ALL)
def test_a_rank_gets_the_blocks_of_its_elements_however_the_other_site_cuts_the_model(name) -> None:
    """Every element is what the whole array decodes to, and no block is sent twice."""
    form = FORMATS[name]
    values = numbers(3000 + 400)
    pieces = [(0, "w", Region(0, 3000)), (3000, "v", Region(100, 400))]
    records, whole = encode(form, values), decode(form, encode(form, values))
    server = Server("127.0.0.1", run="run", member="a:1", pieces=pieces, limit_s=60)
    server.publish(3, {"changes": records})
    columns, _ = shard((60, 50), 1, 1, 2)  # columns 25 to 49 of a [60, 50] matrix
    for mine in (
        [(0, "v", Region(150, 9)), (9, "w", columns)],
        [(0, "w", Region(2900, 100)), (100, "v", Region(0, 200))],
    ):
        peer = Peer(server.address, run="run", member="a:1")
        blocks = Blocks(peer.covers(mine, soon()))
        into = np.full(mine[1][0] + mine[1][2].numel, -1, np.float32)
        wanted = blocks.wanted(form.record)
        received = np.empty(blocks.count * form.record, np.uint8)
        assert peer.fetch("changes", 3, wanted, received, soon()) == received.nbytes <= records.nbytes
        blocks.spread(decode(form, received), into)
        if mine[0][1] == "v":
            assert (into[:9] == whole[3050:3059]).all()
            assert (into[9:].reshape(60, 25) == whole[:3000].reshape(60, 50)[:, 25:]).all()
            assert blocks.runs == [(0, 12)]  # 3059 / 256, of which `w` begins in each
        else:
            assert (into[:100] == whole[2900:3000]).all() and (into[200:300] == whole[3000:3100]).all()
            assert blocks.runs == [(11, 2)]
    server.close()


@pytest.mark.parametrize("name", ALL)
def test_compressed_sites_agree_to_the_last_bit_and_make_up_for_what_they_lose(begun, name) -> None:
    """Three sites whose parameters grow by unequal steps; after 40 rounds the mean is that of fp32.

    Tensors of 6 elements: a block, in which the largest loss is bounded as above, for growth of 1 a round.
    """
    _, made = begun("abc", compress=name)
    shape = torch.tensor([1.0, -0.5, 0.3, 0.01, -0.002, 0.7])

    def step(site, engine, growth):
        def run() -> None:
            engine.values += growth * shape
            site.after_update(1, 0.001, complete=False)
            site.after_update(2, 0.001, complete=False)

        return run

    for _ in range(40):
        at_once(*(step(site, engine, growth) for (site, engine, _), growth in zip(made, (1, 2, 3), strict=True)))
    first, *others = (engine.values for _, engine, _ in made)
    assert all(each.tolist() == first.tolist() for each in others)
    kept = torch.stack([torch.from_numpy(site._feedback.residual) for site, _, _ in made]).mean(0)
    assert torch.allclose(first + kept, 80 * shape, rtol=1e-5)
    told = made[0][2][-1][1]
    assert told["used"] == ["a", "b", "c"] and told["received_bytes"] == 2 * RECORD[name]
