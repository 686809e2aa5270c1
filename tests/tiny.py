"""Tiny models with random weights, and a tokenizer to go with them."""

import itertools
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.network import DrafterNetwork
from d3d_ray.models.section import DrafterSection
from d3d_ray.models.target import Target

FAMILIES = ("llama", "qwen2", "qwen3")

PAD, START, END, MASK = 0, 1, 2, 3
# Qwen2's tokenizer class adds "<|endoftext|>" where it is missing.
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_model(
    family: str, num_layers: int = 2, vocab: int = 512, seed: int = 0, **config_overrides: Any
) -> PreTrainedModel:
    """A causal LM of the family in fp32; ``END`` is its stop token.

    Weights are drawn wide enough that greedy answers are not constant, norms and biases included,
    so that none of them can be forgotten unnoticed.
    """
    settings = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": PAD,
        **config_overrides,
    }
    config = AutoConfig.for_model(family, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_norm = name.endswith("norm.weight")
                parameter.normal_(1.0 if is_norm else 0.0, 0.2)
    return model.eval()


def tiny_tokenizer(vocab: int = 512) -> PreTrainedTokenizerFast:
    """Byte-level BPE: special tokens, the 256 bytes, then pairs of letters up to ``vocab`` ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_pairs = vocab - len(_SPECIAL) - len(alphabet)
    letters = "abcdefghijklmnopqrstuvwxyz"
    assert 0 <= num_pairs <= len(letters) ** 2
    merges = list(itertools.islice(itertools.product(letters, repeat=2), num_pairs))
    tokens = [*_SPECIAL, *alphabet, *(first + second for first, second in merges)]
    backend = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|mask|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny(
    folder: str | Path,
    family: str,
    *,
    num_layers: int = 2,
    vocab: int = 512,
    num_tokens: int | None = None,
    seed: int = 0,
    **config_overrides: Any,
) -> PreTrainedModel:
    """Write a whole Hugging Face folder; ``num_tokens < vocab`` leaves rows of padding."""
    model = tiny_model(family, num_layers, vocab, seed, **config_overrides)
    model.save_pretrained(folder)
    tiny_tokenizer(vocab if num_tokens is None else num_tokens).save_pretrained(folder)
    return model


def tiny_target(family: str = "llama", **options: Any) -> Target:
    """A target around :func:`tiny_model` whose logits are not cut."""
    model = tiny_model(family, **options)
    return Target(model, vocab_size=model.config.vocab_size, stop_ids=frozenset({END}))


def tiny_drafter(
    family: str = "llama",
    *,
    block_size: int = 4,
    label_shift: bool = True,
    **options: Any,
) -> DrafterModel:
    """A drafter around :func:`tiny_model` with a mask embedding of its own."""
    model = tiny_model(family, **options)
    generator = torch.Generator().manual_seed(7)
    network = DrafterNetwork(
        model,
        mask_token_id=MASK,
        mask_embedding=0.2 * torch.randn(model.config.hidden_size, generator=generator),
    )
    section = DrafterSection(
        block_size=block_size,
        mask_token_id=MASK,
        label_shift=label_shift,
        source_layers=tuple(range(model.config.num_hidden_layers)),
        is_trained=True,
    )
    return DrafterModel(network, section, vocab_size=model.config.vocab_size)
