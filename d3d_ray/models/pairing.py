"""Whether a drafter fits a target: checked once, before anything is decoded."""

from typing import Protocol

from transformers import PreTrainedTokenizerBase

from d3d_ray.models.drafter import DrafterModel


class TargetInfo(Protocol):
    """What has to be known of a target, which may live in another process."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def stop_ids(self) -> frozenset[int]: ...


def check_pair(
    target: TargetInfo,
    drafter: DrafterModel,
    target_tokenizer: PreTrainedTokenizerBase,
    drafter_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Refuse a drafter that could not draft well, or at all, for this target.

    Raises ``ValueError`` when the vocabularies differ (rows of padding beyond the tokenizer do
    not count), when the mask token is out of range, stops answers or stands in ordinary text, or
    when the block is too small.
    """
    check_vocabularies(target_tokenizer, drafter_tokenizer, drafter.mask_token_id)
    num_rows = drafter.network.config.vocab_size
    if num_rows < target.vocab_size:
        raise ValueError(
            f"the drafter embeds {num_rows} ids, the target emits {target.vocab_size}; "
            "use a drafter made for this target"
        )
    check_mask_token(
        drafter.mask_token_id,
        num_rows=num_rows,
        stop_ids=target.stop_ids,
        tokenizer=target_tokenizer,
    )
    assert drafter.block_size >= 2, "refused when the drafter is loaded"


def check_vocabularies(
    target_tokenizer: PreTrainedTokenizerBase,
    drafter_tokenizer: PreTrainedTokenizerBase,
    mask_token_id: int | None = None,
) -> None:
    """Raise ``ValueError`` naming the first id that means two things.

    The drafter's tokenizer may have a mask token of its own that the target's lacks.
    """
    target_tokens = {id_: token for token, id_ in target_tokenizer.get_vocab().items()}
    drafter_tokens = {id_: token for token, id_ in drafter_tokenizer.get_vocab().items()}
    for id_ in sorted(target_tokens.keys() | drafter_tokens.keys()):
        target_token, drafter_token = target_tokens.get(id_), drafter_tokens.get(id_)
        if target_token != drafter_token and not (id_ == mask_token_id and target_token is None):
            raise ValueError(
                f"target and drafter have different vocabularies: id {id_} is {target_token!r} "
                f"for the target and {drafter_token!r} for the drafter; use a drafter that was "
                "made for this target"
            )


def check_mask_token(
    mask_token_id: int,
    *,
    num_rows: int,
    stop_ids: frozenset[int],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Raise ``ValueError`` for a mask token that cannot be told from text.

    Good ones are a special token that nothing uses, or a row of padding beyond the tokenizer's
    ids but below ``num_rows``, the rows of the drafter's embedding table.
    """
    remedy = "set drafter.mask_token_id to a reserved token that no text uses"
    if not 0 <= mask_token_id < num_rows:
        raise ValueError(f"mask token {mask_token_id} is not in [0, {num_rows}); {remedy}")
    if mask_token_id in stop_ids:
        raise ValueError(f"mask token {mask_token_id} is a stop token; {remedy}")
    tokens = {id_: token for token, id_ in tokenizer.get_vocab().items()}
    token = tokens.get(mask_token_id)
    if token is None:
        return
    is_special = mask_token_id in tokenizer.all_special_ids
    if not is_special and mask_token_id not in tokenizer.added_tokens_decoder:
        raise ValueError(f"mask token {mask_token_id} is {token!r}, ordinary text; {remedy}")
    # Committed rows with the mask token's id would be read as masks, in every prompt.
    if mask_token_id == tokenizer.bos_token_id or token in _template(tokenizer):
        raise ValueError(f"mask token {mask_token_id} is {token!r}, used in prompts; {remedy}")


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return "".join(template.values())
    return template or ""
