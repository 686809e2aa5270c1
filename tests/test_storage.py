"""Drafters in 8 bits: how far they are off, and that they stay the same; the job."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny, tiny_drafter, tiny_tokenizer

from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.drafter_folder import load_drafter, save_drafter
from d3d_ray.models.loading import read_tensors
from d3d_ray.models.storage import quantise, restore

ROOT = Path(__file__).parents[1]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNUSED = "/unused"
MATRIX = "model.layers.0.mlp.up_proj.weight"


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def load(folder: Path, target: str = UNUSED, dtype: torch.dtype = torch.float32) -> DrafterModel:
    return load_drafter(str(folder), target_source=target, dtype=dtype, device="cpu")


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


# --- the code ------------------------------------------------------------------------------------


def test_a_weight_is_off_by_half_a_step_and_the_largest_by_two() -> None:
    weight = draw(512, 128)
    stored = quantise({"w": weight})
    steps, scale = stored["w"], stored["w.scale"][:, None]
    assert (steps.dtype, scale.dtype) == (torch.int8, torch.float32)
    difference = (weight - steps * scale).abs()
    is_cut = weight.abs() > 127.5 * scale
    assert is_cut.any() and is_cut.sum(dim=1).max() <= 3
    assert (difference <= 0.5001 * scale)[~is_cut].all()
    assert (difference <= 2.0 * scale).all()
    plain = weight.abs().amax(dim=1, keepdim=True) / 127
    plain_error = (weight - (weight / plain).round() * plain).square().sum()
    assert difference.square().sum() < 1.1 * plain_error


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_restored_becomes_the_same_bits_again(dtype: torch.dtype) -> None:
    largest = torch.linspace(1, 2, 513)[:, None] * 2.0 ** torch.arange(-6, 2)  # Every mantissa.
    rows = draw(largest.numel(), 64, seed=1)
    rows *= largest.reshape(-1, 1) / rows.abs().amax(dim=1, keepdim=True)
    first = quantise({"w": rows})
    assert len(torch.frexp(first["w.scale"]).mantissa.unique()) == 64
    assert (first["w"].abs().amax(dim=1) == 127).all()
    assert_equal(quantise(restore(first, dtype)), first)


def test_zeros_and_single_weights_in_a_row_are_kept() -> None:
    weight = torch.zeros(2, 512)
    weight[1, 7] = -0.3
    stored = quantise({"w": weight})
    again = restore(stored, torch.float32)["w"]
    assert torch.equal(again[0], weight[0])
    assert again[1, 7] == pytest.approx(-0.3, rel=0.02) and again[1].count_nonzero() == 1
    assert_equal(quantise({"w": again}), stored)


def test_vectors_and_small_matrices_stay_as_they_are() -> None:
    tensors = {"norm": draw(2048), "small": draw(8, 8), "ids": torch.ones(64, 64).long()}
    assert_equal(quantise(tensors), tensors)
    assert_equal(restore(tensors, torch.bfloat16), tensors)


@pytest.mark.parametrize("rows", [None, 31])
def test_a_matrix_without_its_scales_is_refused_by_name(rows: int | None) -> None:
    stored = quantise({"some.weight": draw(32, 64)})
    scale = stored.pop("some.weight.scale")
    if rows is not None:
        stored["some.weight.scale"] = scale[:rows]
    with pytest.raises(ValueError, match=r"some\.weight is in 8 bits, but some\.weight\.scale"):
        restore(stored, torch.float32)


# --- folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_in_8_bits_loads_and_saves_the_same_bits(
    dtype: torch.dtype, is_tied: bool, tmp_path: Path
) -> None:
    whole = tiny_drafter("qwen2", tie_word_embeddings=is_tied)
    whole.network.to(dtype)
    save_drafter(whole, tmp_path / "whole", tiny_tokenizer())
    drafter = whole
    for name in ("a", "b"):
        save_drafter(drafter, tmp_path / name, tiny_tokenizer(), bits=8)
        drafter = load(tmp_path / name, dtype=dtype)
        assert drafter.section.bits == 8
    stored = read_tensors(str(tmp_path / "a"))
    assert_equal(read_tensors(str(tmp_path / "b")), stored)
    assert stored[MATRIX].dtype == torch.int8 and "model.norm.weight" in stored
    assert ("lm_head.weight" in stored) != is_tied
    assert torch.equal(drafter.network.mask_embedding, whole.network.mask_embedding)
    again = drafter.network.state_dict()
    for name, tensor in whole.network.state_dict().items():
        limit = 0.02 * tensor.norm() if tensor.ndim == 2 else 1e-9
        assert (again[name] - tensor).norm() < limit, name
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("a", "whole")]
    assert sizes[0] < (0.35 if dtype == torch.float32 else 0.65) * sizes[1]


def test_what_is_the_target_s_stays_exact_and_is_not_stored(tmp_path: Path) -> None:
    target = save_tiny(tmp_path / "target", "llama")
    drafter = tiny_drafter("llama", num_layers=1)
    model = drafter.network.model
    model.load_state_dict({n: target.state_dict()[n] for n in model.state_dict()})
    source = str(tmp_path / "target")
    for name in ("a", "b"):
        save_drafter(drafter, tmp_path / name, tiny_tokenizer(), target_source=source, bits=8)
        drafter = load(tmp_path / name, source)
        assert drafter.section.shared_with_target == ("lm_head.weight", "model.embed_tokens.weight")
    stored = read_tensors(str(tmp_path / "a"))
    assert not {"lm_head.weight", "model.embed_tokens.weight"} & set(stored)
    assert_equal(read_tensors(str(tmp_path / "b")), stored)
    table = drafter.network.model.model.embed_tokens.weight
    assert torch.equal(table, target.model.embed_tokens.weight)


def test_shards_are_read_together_and_a_lost_scale_is_named(tmp_path: Path) -> None:
    drafter = tiny_drafter(vocab=16_384)
    save_drafter(drafter, tmp_path / "one", tiny_tokenizer(), bits=8)
    save_drafter(drafter, tmp_path / "many", tiny_tokenizer(), bits=8, max_shard_mb=1)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert_equal(read_tensors(str(tmp_path / "many")), read_tensors(str(tmp_path / "one")))
    load(tmp_path / "many")
    for file in (tmp_path / "many").glob("*.safetensors"):
        rest = {name: t for name, t in load_file(file).items() if name != f"{MATRIX}.scale"}
        save_file(rest, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{MATRIX} is in 8 bits, but {MATRIX}.scale is missing"):
        load(tmp_path / "many")


def test_other_bits_and_a_choice_of_layers_are_refused(tmp_path: Path) -> None:
    drafter = tiny_drafter()
    with pytest.raises(ValueError, match="in 8 bits or as they are, not in 4"):
        save_drafter(drafter, tmp_path / "4", bits=4)
    assert not (tmp_path / "4").exists()
    save_drafter(drafter, tmp_path, tiny_tokenizer(), bits=8)
    options = {"target_source": UNUSED, "dtype": torch.float32, "device": "cpu"}
    with pytest.raises(ValueError, match=r"no whole checkpoint; leave drafter\.num_layers out"):
        load_drafter(str(tmp_path), num_layers=1, block_size=4, mask_token_id=3, **options)
    config = json.loads((tmp_path / "config.json").read_text())
    config["d3d"]["bits"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="not in 3"):
        load(tmp_path)


# --- the job -------------------------------------------------------------------------------------


def test_the_job_copies_a_drafter_and_says_what_it_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sys.path.insert(0, str(ROOT))
    from d3d_ray.command_line import run_job
    from jobs.export import export

    drafter = tiny_drafter(vocab=16_384)
    save_drafter(drafter, tmp_path / "whole", tiny_tokenizer())
    small = tmp_path / "small"
    command = ["--drafter", str(tmp_path / "whole"), "--output", str(small), "--max-shard-mb", "1"]
    assert run_job(export, [*command, "--bits", "8"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert " MB, the largest file 0." in first
    assert 0 < float(second.rpartition(" ")[2].rstrip("%")) < 2
    assert load(small).section.bits == 8
    plain = tmp_path / "plain"
    assert run_job(export, ["--drafter", str(small), "--output", str(plain)]) == 0
    assert capsys.readouterr().out.endswith("largest relative error of a tensor: 0.00%\n")
    assert load(plain).section.bits is None
    for wrong, words in (
        (command, "is there already: give a new folder"),
        ([*command[:3], str(tmp_path / "new"), "--bits", "4"], "invalid choice: 4"),
        ([*command[:3], str(tmp_path / "new"), "--max-shard-mb", "0"], "at least 1, not 0"),
    ):
        assert run_job(export, wrong) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
