"""NEFTune: how much noise, on which tokens, and when."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from llmtrain.models.neftune import Neftune, text_lengths

ALPHA, WIDTH = 5.0, 64


def noise_of(lengths: Tensor, seed: int, *, training: bool = True) -> Tensor:
    """What an embedding of zeros gives."""
    embedding = nn.Embedding(8, WIDTH).train(training)
    nn.init.zeros_(embedding.weight)
    Neftune(embedding, ALPHA).lengths_BT = lengths
    torch.manual_seed(seed)
    found: Tensor = embedding(torch.zeros_like(lengths))
    found.sum().backward()
    assert embedding.weight.grad is not None and embedding.weight.grad[0, 0] == lengths.numel()  # as without noise
    return found.detach()


def test_noise_is_uniform_up_to_the_bound_of_the_text_and_a_function_of_the_seed() -> None:
    """Its root mean square is the bound over the root of 3; of 32,768 numbers within 1 %."""
    lengths = torch.tensor([[16] * 512, [400] * 512])
    noise = noise_of(lengths, 1)
    for row, length in enumerate((16, 400)):
        bound = ALPHA / math.sqrt(length * WIDTH)
        assert 0.99 * bound < noise[row].abs().max() <= bound
        assert abs(noise[row].square().mean().sqrt() / (bound / math.sqrt(3)) - 1) < 0.01
    assert torch.equal(noise, noise_of(lengths, 1)) and not torch.equal(noise, noise_of(lengths, 2))
    assert not noise_of(lengths, 1, training=False).any()


def test_a_text_is_a_document_or_the_row() -> None:
    inputs = torch.zeros(2, 6, dtype=torch.long)
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]])
    assert text_lengths(inputs, positions).tolist() == [[3, 3, 3, 1, 2, 2], [6] * 6]
    assert text_lengths(inputs, None).tolist() == [[6] * 6] * 2
