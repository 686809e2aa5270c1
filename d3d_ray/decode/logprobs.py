"""Log-probabilities of tokens that are decided already; they never change one."""

from collections.abc import Sequence

import torch

from d3d_ray.decode.protocols import Block, Verifier
from d3d_ray.records import Request, TokenLogprobs


def rate(
    logits: torch.Tensor,  # [rows, vocab], raw
    tokens: Sequence[int],  # at most rows of them
    num_top: int | None,
) -> tuple[TokenLogprobs, ...]:
    """What row i says of ``tokens[i]``, and of the ``num_top`` likeliest ones; None = nothing."""
    if num_top is None:
        return ()
    return tuple(_rate_row(logits[row], token, num_top) for row, token in enumerate(tokens))


def rate_prompt(verifier: Verifier, request: Request, block: Block) -> tuple[TokenLogprobs, ...]:
    """What the rows of a prompt's chunk say of the tokens that follow them in the prompt.

    Runs the chunk and takes it back: run for the draw it must have the shape that it always has.
    """
    every_row = Block(block.request, block.start, block.tokens, num_logits=len(block.tokens))
    logits = verifier.forward([every_row])[0]
    verifier.cut(block.request, block.start)
    following = request.prompt[block.start + 1 : block.start + 1 + len(block.tokens)]
    return rate(logits, following, request.sampling.num_prompt_logprobs)


def _rate_row(
    logits: torch.Tensor,  # [vocab]
    token: int,
    num_top: int,
) -> TokenLogprobs:
    # A row by itself, and always a copy: so the sum is the same bits wherever the row came from,
    # and there is never more than one row in fp32.
    logprobs = logits.to(torch.float32, copy=True).log_softmax(dim=-1)
    best = logprobs.topk(min(num_top, len(logprobs)))
    top = sorted(zip(best.indices.tolist(), best.values.tolist(), strict=True), key=_by_rank)
    return TokenLogprobs(token, float(logprobs[token]), tuple(top))


def _by_rank(entry: tuple[int, float]) -> tuple[float, int]:
    return -entry[1], entry[0]
