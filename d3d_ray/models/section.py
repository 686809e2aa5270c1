"""The section ``d3d`` of a drafter's ``config.json``: what makes a checkpoint a drafter."""

from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig

from d3d_ray.models.network import check_family

SECTION = "d3d"
DFLASH_SECTION = "dflash_config"
"""In its place in the ``config.json`` of a DFlash drafter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSection:
    """Raises ``ValueError`` on a value out of range."""

    block_size: int
    """Anchor and drafts together."""
    mask_token_id: int
    label_shift: bool
    """A row at position p predicts p + 1; without the shift a mask at p predicts p."""
    source_layers: tuple[int, ...]
    """Which layers of the original checkpoint are left."""
    is_trained: bool
    shared_with_target: tuple[str, ...] = ()
    """Tensors that the folder leaves out, since they are the target's."""
    fingerprint: str = ""
    """Of those tensors, as the target's checkpoint has them."""
    draft_vocab_size: int | None = None
    """How many tokens can be drafted; None = all."""
    bits: int | None = None
    """Of the stored weight matrices, 8; None = they are stored as they are."""

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ValueError(
                f"drafter.block_size is {self.block_size}; it counts the anchor, so give 2 or more"
            )
        if self.mask_token_id < 0:
            raise ValueError(
                f"drafter.mask_token_id is {self.mask_token_id}; give a reserved token's id"
            )
        if self.bits not in (None, 8):
            raise ValueError(f"weights are stored in 8 bits or as they are, not in {self.bits}")


def read_section(
    config: PretrainedConfig,
    source: str,
    block_size: int | None,
    mask_token_id: int | None,
    label_shift: bool | None,
) -> DrafterSection:
    """The section of a checkpoint, or one made of the options where it has none.

    Raises ``ValueError`` for an option that is missing or is not what the folder was trained with.
    """
    check_family(config)
    if getattr(config, DFLASH_SECTION, None) is not None:
        raise ValueError(
            f"{source} is a DFlash drafter: set dflash.source to it, and drafter.source to another"
        )
    stored = getattr(config, SECTION, None)
    if stored is None:
        return DrafterSection(
            block_size=required("block_size", block_size, source),
            mask_token_id=required("mask_token_id", mask_token_id, source),
            label_shift=bool(label_shift),
            source_layers=tuple(range(config.num_hidden_layers)),
            is_trained=True,
        )
    try:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in stored.items()
        }
        section = DrafterSection(**values)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the section {SECTION!r} of {source}/config.json: {error}") from error
    for name, given in (("mask_token_id", mask_token_id), ("label_shift", label_shift)):
        if given is not None and given != getattr(section, name):
            raise ValueError(
                f"drafter.{name} is {given}, but {source} was trained with "
                f"{getattr(section, name)}; leave the option out"
            )
    return section if block_size is None else replace(section, block_size=block_size)


def required(name: str, value: int | None, source: str | None = None) -> int:
    """``value``; raises ``ValueError`` that names the option where it is None."""
    if value is None:
        what = "a drafter made from other weights" if source is None else repr(source)
        raise ValueError(f"{what} does not say its {name}; give drafter.{name}")
    return value
