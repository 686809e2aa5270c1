"""Models by their shape alone: what they need and how fast they run, without their weights."""

import copy

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3Config

QWEN3_MASK = 151669
"""The first row of padding behind Qwen3's tokenizer."""

# Hub name -> hidden, intermediate, layers, attention heads, head tied to the embeddings.
# All have 8 key/value heads of 128 and 151,936 rows of vocabulary.
_QWEN3 = {
    "Qwen/Qwen3-1.7B": (2048, 6144, 28, 16, True),
    "Qwen/Qwen3-8B": (4096, 12288, 36, 32, False),
    "Qwen/Qwen3-32B": (5120, 25600, 64, 64, False),
}


def known_shape(name: str) -> PretrainedConfig | None:
    """The config of a model of the paper, written out here; None for any other name."""
    if name not in _QWEN3:
        return None
    hidden, intermediate, num_layers, num_heads, is_tied = _QWEN3[name]
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=is_tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        eos_token_id=151645,
    )


def with_layers(config: PretrainedConfig, num_layers: int | None) -> PretrainedConfig:
    """The same shape with another number of layers; None = as it is."""
    if num_layers is None:
        return config
    config = copy.deepcopy(config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:num_layers]
    return config


def build_random(
    config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> PreTrainedModel:
    """A model with random weights, made on the device itself: no file, no copy."""
    torch.manual_seed(seed)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def count_weight_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of the weights, tied ones once; built on the meta device, so it costs no memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return sum(parameter.nbytes for parameter in model.parameters())


def count_kv_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token adds to the cache."""
    config = config.get_text_config(decoder=True)
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_values: int = 2 * config.num_hidden_layers * num_heads * head_dim
    return num_values * dtype.itemsize
