"""Settings of training runs, and the recipes that come with the package."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from d3d_ray.bench.shapes import known_shape
from d3d_ray.config import to_dict, to_yaml
from d3d_ray.models.network import DrafterNetwork
from d3d_ray.models.section import DrafterSection
from d3d_ray.settings import build, list_settings
from d3d_ray.training.config import (
    TrainingConfig,
    list_recipes,
    load_training_config,
    training_table,
)
from d3d_ray.training.objective import default_gamma
from d3d_ray.training.setup import freeze

QWEN = ["qwen3-32b-drafter-8b", "qwen3-8b-drafter-1.7b"]
H100_BYTES = 80e9


def test_all_recipes_load_and_survive_a_round_trip(tmp_path):
    assert list_recipes() == [*QWEN, "smollm2-cpu", "smollm2-dflash-cpu"]
    for name in list_recipes():
        config = load_training_config(name)
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        assert load_training_config(str(tmp_path / "config.yaml")) == config
        assert build(TrainingConfig, to_dict(config)) == config


def test_overrides_reach_every_section():
    config = load_training_config(
        "smollm2-cpu",
        ["optimiser.learning_rate=1e-4", "data.num_anchors=9", "evaluation.every=null", "seed=3"],
    )
    assert config.optimiser.learning_rate == 1e-4
    assert (config.data.num_anchors, config.evaluation.every, config.seed) == (9, None, 3)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimiser.lerning_rate=1", r"unknown setting.*nearest.*optimiser\.learning_rate"),
        ("optimiser.zero_stage=4", r"optimiser\.zero_stage must be"),
        ("optimiser.dtype=float16", r"optimiser\.dtype must be bfloat16 or float32"),
        ("data.seeded_share=1.5", r"data\.seeded_share must be at most 1"),
        ("num_workers=0", "num_workers must be at least 1"),
        ("objective.gamma=0", r"objective\.gamma must be above 0"),
        ("drafter.dtype=float32", r"drafter\.dtype.*optimiser\.dtype"),
        ("data=3", "unknown setting 'data'"),
        ("objective.kind=other", r"objective\.kind must be d3d or dflash"),
    ],
)
def test_wrong_settings_are_refused(override, words):
    with pytest.raises(ValueError, match=words):
        load_training_config("smollm2-cpu", [override])


def test_an_unknown_recipe_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="nearest preset is 'smollm2-cpu'"):
        load_training_config("smollm-cpu")


def test_every_setting_says_what_it_means():
    assert all(setting.meaning for setting in list_settings(TrainingConfig))
    assert "| `optimiser.zero_stage` |" in training_table()


@pytest.mark.parametrize("name", QWEN)
def test_a_qwen_recipe_fits_its_models_and_eight_gpus(name):
    """The models are built from their configs, without memory and without a network."""
    config = load_training_config(name)
    target, shape = known_shape(config.target.source), known_shape(config.drafter.source)
    assert target is not None and shape is not None
    assert config.drafter.num_layers == shape.num_hidden_layers
    assert config.drafter.block_size is not None and config.drafter.mask_token_id is not None
    assert default_gamma(config.drafter.block_size) == 7.0
    section = DrafterSection(
        block_size=config.drafter.block_size,
        mask_token_id=config.drafter.mask_token_id,
        label_shift=bool(config.drafter.label_shift),
        source_layers=tuple(range(shape.num_hidden_layers)),
        is_trained=False,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
        network = DrafterNetwork(
            model,
            mask_token_id=section.mask_token_id,
            mask_embedding=torch.zeros(shape.hidden_size, dtype=torch.bfloat16),
        )
        freeze(network, config.objective)
        rows = torch.zeros(1, 64, dtype=torch.int64)
        hidden = network(rows, rows, torch.ones(1, 1, 64, 64, dtype=torch.bool))
        assert network.head(hidden).shape == (1, 64, target.vocab_size)
    num_trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    num_all = sum(p.numel() for p in network.parameters())
    assert 0.8 * num_all < num_trained < num_all
    # Weights and gradients in bf16, copy and two moments in fp32, accumulated gradients in fp32.
    sharded = (2 * num_all + 18 * num_trained) / config.num_workers
    assert config.optimiser.zero_stage == 3 and config.num_workers == 8
    assert sharded < 0.3 * H100_BYTES


@pytest.mark.parametrize(
    "override",
    [
        "drafter.label_shift=true",
        "data.seeded_share=0.2",
        "objective.ar_weight=0.1",
        "objective.soft_weight=0.5",
        "objective.draft_vocab_size=64",
        "objective.train_head=true",
        "optimiser.activation_checkpointing=true",
    ],
)
def test_what_a_dflash_drafter_has_not_is_refused(override):
    path = override.partition("=")[0].replace(".", r"\.")
    with pytest.raises(ValueError, match=rf"{path} means nothing for objective\.kind=dflash"):
        load_training_config("smollm2-dflash-cpu", [override])
