"""The drafter that comes with the package, with the real target."""

from pathlib import Path

import pytest
import torch
from loops import make_request, run

import d3d_ray
from d3d_ray.config import load_config
from d3d_ray.decode.packed_plan import PackedPlan
from d3d_ray.metrics import summarise
from d3d_ray.models.drafter_folder import load_drafter, load_drafter_tokenizer
from d3d_ray.models.loading import load_target, load_tokenizer
from d3d_ray.models.pairing import check_pair
from d3d_ray.training.evaluation import InlineDrafter

PRESET = load_config("smollm2-cpu")
DRAFTERS = Path(d3d_ray.__file__).parent / "drafters"
QUESTION = "Tom has 3 boxes with 12 pencils each. He gives away 7 pencils. How many are left?"


@pytest.mark.slow
def test_the_preset_s_drafter_is_trained_and_fits_its_target() -> None:
    source = PRESET.target.source
    assert PRESET.drafter.source is not None
    target = load_target(source, dtype=torch.bfloat16, device="cpu")
    drafter = load_drafter(
        PRESET.drafter.source, target_source=source, dtype=torch.bfloat16, device="cpu"
    )
    assert drafter.is_trained
    own = load_drafter_tokenizer(PRESET.drafter.source, target_source=source)
    tokenizer = load_tokenizer(source)
    check_pair(target, drafter, tokenizer, own)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    target.fix_rows(drafter.block_size)
    plan = PackedPlan(drafter, max_rows=64, is_noise_shared=True)
    plain, drafted = (
        run(
            target,
            InlineDrafter(plan),
            [make_request(prompt=prompt, mode=mode, max_tokens=32)],
            block_size=drafter.block_size,
            vocab_size=target.vocab_size,
            max_wait_s=60.0,
        )
        for mode in ("ar", "sync")
    )
    assert drafted.tokens("a") == plain.tokens("a")
    # An untrained one stays near 1; other CPUs round otherwise, so the bound is loose.
    assert summarise(drafted.last("a").rounds).acceptance_length > 1.5


def test_what_ships_is_small_and_has_a_card() -> None:
    folders = [folder for folder in DRAFTERS.iterdir() if folder.is_dir()]
    assert folders
    for folder in folders:
        sizes = [file.stat().st_size for file in folder.iterdir()]
        assert sum(sizes) <= 60e6 and max(sizes) <= 45e6
        assert (folder / "README.md").is_file()
