"""The target's keyed draws: processed logits plus noise that depends on nothing but its key.

The noise of a draw is a counter-based hash of (seed, choice, absolute position, token id). A draw
is ``argmax(log p + Gumbel noise)``, so a seed gives the same text in every mode, at every block
size, alone or in company. Used by the verifier, and by a drafter that shares the noise.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from d3d_ray.records import Sampling

_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF


class NonFiniteLogitsError(RuntimeError):
    """The target produced NaN or infinite logits; the request cannot go on."""


class History:
    """The tokens that penalties look at: which ids were seen, and how often in the output."""

    def __init__(self, prompt: Iterable[int], output: Iterable[int] = ()) -> None:
        self.seen = set(prompt)
        self.output_counts: Counter[int] = Counter()
        self.extend(output)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.seen.add(token)
            self.output_counts[token] += 1


def draw(
    logits: torch.Tensor,  # [rows, vocab]
    sampling: Sampling,
    *,
    position: int,
    drafts: Sequence[int] = (),
    history: History | None = None,
    num_output: int = 0,
    stop_ids: Iterable[int] = (),
) -> torch.Tensor:  # [rows] int64
    """Draw the token at ``position + i`` from row i, given that the drafts before it were kept.

    ``num_output`` is the number of output tokens before ``position``. Raises
    :class:`NonFiniteLogitsError` when a row has no finite maximum.
    """
    scores = processed_scores(
        logits,
        sampling,
        position=position,
        drafts=drafts,
        history=history,
        num_output=num_output,
        stop_ids=stop_ids,
    )
    best, tokens = scores.max(dim=-1)
    if not bool(torch.isfinite(best).all()):
        raise NonFiniteLogitsError(
            "the model gave NaN or infinite logits at positions "
            f"{position} to {position + len(logits) - 1}"
        )
    return tokens


def processed_scores(
    logits: torch.Tensor,  # [rows, vocab]
    sampling: Sampling,
    *,
    position: int,
    drafts: Sequence[int] = (),
    history: History | None = None,
    num_output: int = 0,
    stop_ids: Iterable[int] = (),
) -> torch.Tensor:  # [rows, vocab] fp32
    """The scores whose argmax is the draw: the whole order of processing, then the noise."""
    scores = logits.float()
    if sampling.has_penalties:
        assert history is not None
        scores = penalise(scores, sampling, history, drafts)
    num_forbidden_rows = min(sampling.min_tokens - num_output, len(scores))
    stops = list(stop_ids) if num_forbidden_rows > 0 else []
    if stops:
        scores = scores.clone()
        scores[:num_forbidden_rows, stops] = -torch.inf
    if sampling.is_greedy:
        return scores
    keys = noise_keys(_seed(sampling), sampling.choice, position, len(scores), scores.device)
    return perturb(scores, keys, sampling)


def penalise(
    scores: torch.Tensor,  # [rows, vocab] fp32
    sampling: Sampling,
    history: History,
    drafts: Sequence[int],
) -> torch.Tensor:  # [rows, vocab] fp32
    """Repetition, presence and frequency penalties; row i counts ``drafts[:i]`` as output."""
    scores = scores.clone()
    seen, counts = set(history.seen), Counter(history.output_counts)
    for row in range(len(scores)):
        if row > 0:
            seen.add(drafts[row - 1])
            counts[drafts[row - 1]] += 1
        ids = torch.tensor(sorted(seen), dtype=torch.long, device=scores.device)
        chosen = scores[row, ids]
        scores[row, ids] = torch.where(
            chosen > 0,
            chosen / sampling.repetition_penalty,
            chosen * sampling.repetition_penalty,
        )
        if counts:
            ids = torch.tensor(list(counts), device=scores.device)
            amounts = torch.tensor(list(counts.values()), device=scores.device).float()
            scores[row, ids] -= sampling.presence_penalty + sampling.frequency_penalty * amounts
    return scores


def perturb(
    scores: torch.Tensor,  # [rows, vocab] fp32, penalised
    keys: torch.Tensor,  # [rows, 2] int64, see noise_keys
    sampling: Sampling,
) -> torch.Tensor:  # [rows, vocab] fp32; -inf where top-k or top-p cut
    """Temperature, top-k, top-p, then Gumbel noise on what survives."""
    # With the likeliest token at 0 no temperature can push it out of fp32's range.
    scores = scores - scores.amax(dim=-1, keepdim=True)
    scores = scores / max(sampling.temperature, 1e-30)
    vocab_size = scores.shape[-1]
    if not 0 < sampling.top_k < vocab_size and sampling.top_p >= 1.0:
        ids = torch.arange(vocab_size, device=scores.device)
        return scores + gumbel(keys, ids.expand_as(scores))
    # A stable sort keeps the lower id on ties, so that a cut falls the same way everywhere.
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    if 0 < sampling.top_k < vocab_size:
        ordered, ids = ordered[:, : sampling.top_k], ids[:, : sampling.top_k]
    noisy = ordered + gumbel(keys, ids)
    if sampling.top_p < 1.0:
        probs = ordered.softmax(dim=-1)
        mass_before = probs.cumsum(dim=-1) - probs
        # The likeliest token stays even where top_p is 0 in fp32.
        is_cut = (mass_before >= sampling.top_p) & (mass_before > 0.0)
        noisy = noisy.masked_fill(is_cut, -torch.inf)
    return torch.full_like(scores, -torch.inf).scatter(-1, ids, noisy)


def noise_keys(
    seed: int, choice: int, position: int, num_rows: int, device: torch.device | None = None
) -> torch.Tensor:  # [rows, 2] int64, each a 32-bit word
    """One key for each of the absolute positions ``position … position + num_rows - 1``."""
    base = _mix_64(_mix_64(seed & _MASK_64) ^ choice)
    words = (_mix_64(base ^ (position + row)) for row in range(num_rows))
    return torch.tensor([[word >> 32, word & _MASK_32] for word in words], device=device)


def gumbel(
    keys: torch.Tensor,  # [rows, 2] int64
    ids: torch.Tensor,  # [rows, n] int64 token ids
) -> torch.Tensor:  # [rows, n] fp32
    """Standard Gumbel noise of each (key, token id)."""
    hashed = _mix_32(ids * 0x9E3779B1 + keys[:, :1])
    hashed = _mix_32(hashed ^ keys[:, 1:])
    # Fine steps near 0 become the far upper tail, where rare tokens win their draws.
    uniform = ((hashed.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _seed(sampling: Sampling) -> int:
    assert sampling.seed is not None, "the engine sets a seed before a request is decoded"
    return sampling.seed


def _mix_64(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014) behind one step of its counter."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _mix_32(value: torch.Tensor) -> torch.Tensor:
    """The finaliser of MurmurHash3 on 32-bit words held in int64."""
    value = value & _MASK_32
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & _MASK_32
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) & _MASK_32
    return value ^ (value >> 16)
