"""The DFlash baseline: the public format, what it reads, and the loop's answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_pairs import make_pair
from loops import Results, make_request, make_scheduler
from loops import run as decode
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, MASK, save_tiny, tiny_model
from torch import nn
from torch.nn import functional as F

from d3d_ray.decode.dflash import FeatureDrafting
from d3d_ray.decode.protocols import Block
from d3d_ray.models.dflash import spaced_layers
from d3d_ray.models.dflash_folder import load_dflash, save_dflash
from d3d_ray.models.drafter_folder import load_drafter
from d3d_ray.models.target import Target
from d3d_ray.records import Request, Sampling
from d3d_ray.sampling import draw

PROMPTS = [tuple(range(10 + i, 14 + 3 * i)) for i in range(8)]
TOKENS = (11, 57, 203, 99, 41, 8, 300, 5, 77, 12)
FULL = ["full_attention"]
OPTIONS: dict[str, Any] = {"vocab_size": 512, "dtype": torch.float32}


# --- an independent reference: the public code's formulas in plain torch ---


def reference_logits(
    state: dict[str, torch.Tensor],
    config: Any,
    model: nn.Module,
    layer_ids: list[int],
    context: tuple[int, ...],
    block: list[int],
) -> torch.Tensor:
    """Logits of the masks of a block behind a context, without a cache."""

    def norm(hidden: torch.Tensor, name: str) -> torch.Tensor:
        weight = state[name]
        return F.rms_norm(hidden, weight.shape, weight, config.rms_norm_eps)

    def turn(vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        dim = vectors.shape[-1]
        rates = config.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        angles = (positions[:, None] * rates).repeat(1, 2)[:, None]
        halves = torch.cat([-vectors[..., dim // 2 :], vectors[..., : dim // 2]], dim=-1)
        return vectors * angles.cos() + halves * angles.sin()

    with torch.no_grad():
        output = model(torch.tensor([context]), output_hidden_states=True)
        features = torch.cat([output.hidden_states[i + 1][0] for i in layer_ids], dim=-1)
        seen = norm(features @ state["fc.weight"].T, "hidden_norm.weight")
        rows = model.get_input_embeddings()(torch.tensor(block))
        num_seen, num_rows, dim = len(context), len(block), config.head_dim
        positions = torch.arange(num_seen + num_rows)
        for index in range(config.num_hidden_layers):
            name = f"layers.{index}."
            normed = norm(rows, f"{name}input_layernorm.weight")

            def project(which: str, inputs: torch.Tensor, name: str = name) -> torch.Tensor:
                bias = state.get(f"{name}self_attn.{which}_proj.bias")
                weight = state[f"{name}self_attn.{which}_proj.weight"]
                return F.linear(inputs, weight, bias).view(len(inputs), -1, dim)

            queries = project("q", normed)
            keys = project("k", torch.cat([seen, normed]))
            values = project("v", torch.cat([seen, normed]))
            if f"{name}self_attn.q_norm.weight" in state:
                queries = norm(queries, f"{name}self_attn.q_norm.weight")
                keys = norm(keys, f"{name}self_attn.k_norm.weight")
            queries, keys = turn(queries, positions[num_seen:]), turn(keys, positions)
            groups = queries.shape[1] // keys.shape[1]
            keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * dim**-0.5
            attended = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values)
            out = state[f"{name}self_attn.o_proj.weight"]
            rows = rows + attended.reshape(num_rows, -1) @ out.T
            normed = norm(rows, f"{name}post_attention_layernorm.weight")
            gate, up, down = (
                state[f"{name}mlp.{which}_proj.weight"] for which in ("gate", "up", "down")
            )
            rows = rows + (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
        logits: torch.Tensor = model.lm_head(norm(rows, "norm.weight"))[1:]
        return logits


def write_public(folder: Path, family: str, **changes: Any) -> dict[str, torch.Tensor]:
    """A checkpoint as the public ones are: their config, their names, random weights."""
    model = tiny_model(family, num_layers=2, seed=3)
    state = {
        name.removeprefix("model."): tensor
        for name, tensor in model.state_dict().items()
        if "embed_tokens" not in name and "lm_head" not in name
    }
    generator = torch.Generator().manual_seed(4)
    state["fc.weight"] = 0.2 * torch.randn(32, 96, generator=generator)
    state["hidden_norm.weight"] = 1.0 + 0.2 * torch.randn(32, generator=generator)
    config = {
        **model.config.to_dict(),
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 4,
        "num_target_layers": 6,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [3, 1, 2]},
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors")
    return state


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "target", "qwen3", num_layers=6)
    return tmp_path / "target"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_public_checkpoint_drafts_as_its_formulas_say(
    tmp_path: Path, family: str, is_fused: bool
) -> None:
    model = save_tiny(tmp_path / "target", family, num_layers=6)
    state = write_public(tmp_path / "public", family)
    source = {"target_source": str(tmp_path / "target")}
    drafter = load_dflash(str(tmp_path / "public"), model, **source, **OPTIONS)
    if is_fused:
        drafter.fuse()
    target = Target(model, vocab_size=512)
    target.read_with(drafter)
    # Chunks of a prompt, a block of which a part is rejected, then one behind it.
    target.forward([Block("a", 0, TOKENS[:4], 0, is_read=True)])
    target.forward([Block("a", 4, TOKENS[4:7], 1, is_read=True)])
    for num_known in (7, 9):
        if num_known == 9:
            target.forward([Block("a", 7, (*TOKENS[7:9], 400, 401), 4, is_read=True)])
            target.cut("a", 9)
        block = [TOKENS[num_known], MASK, MASK, MASK]
        expected = reference_logits(
            state, drafter.network.config, model, [3, 1, 2], TOKENS[:num_known], block
        )
        expected[:, MASK] = -torch.inf
        for _ in range(2):  # Drafting leaves nothing behind.
            found = drafter.draft("a", TOKENS[: num_known + 1])
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    target.free("a")
    assert not drafter._states


def test_a_saved_drafter_is_the_same_and_in_8_bits_nearly(
    target_folder: Path, tmp_path: Path
) -> None:
    model = tiny_model("qwen3", num_layers=6)
    state = write_public(tmp_path / "public", "qwen3")
    source = {"target_source": str(target_folder)}
    drafter = load_dflash(str(tmp_path / "public"), model, **source, **OPTIONS)
    save_dflash(drafter, tmp_path / "again")
    again = load_dflash(str(tmp_path / "again"), model, **source, **OPTIONS)
    assert again.section == drafter.section
    assert state.keys() == again.network.state_dict().keys()
    for name, tensor in again.network.state_dict().items():
        assert torch.equal(tensor, state[name])
    save_dflash(drafter, tmp_path / "small", bits=8)
    small = load_dflash(str(tmp_path / "small"), model, **source, **OPTIONS)
    for name, tensor in small.network.state_dict().items():
        torch.testing.assert_close(tensor, state[name], atol=0.01, rtol=0.0)
    names = "embed_tokens", "lm_head"
    assert not any(part in name for name in state for part in names)


def test_the_export_job_takes_dflash_folders(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from jobs.export import export

    write_public(tmp_path / "public", "qwen3")
    command = ["--drafter", str(tmp_path / "public"), "--output", str(tmp_path / "small")]
    with pytest.raises(ValueError, match="give --target"):
        export(command)
    assert export([*command, "--bits", "8", "--target", str(target_folder)]) == 0
    assert "largest relative error of a tensor: 0." in capsys.readouterr().out
    stored = load_file(tmp_path / "small" / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.int8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dflash_config": None}, "no section 'dflash_config'"),
        ({"dflash_config": {"target_layer_ids": [1, 2, 3]}}, "does not say mask_token_id"),
        ({"block_size": 1}, "block_size is 1"),
        ({"num_target_layers": 36}, "num_target_layers=36, and this one has 6"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 2, 5]}}, "reads layer 5"),
        ({"dflash_config": {"mask_token_id": 600, "target_layer_ids": [1, 2, 3]}}, "token 600"),
        (
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 2]}},
            "fc.weight has",
        ),
        (
            {"num_hidden_layers": 3, "layer_types": FULL * 3},
            "layers.2.input.* is missing",
        ),
        (
            {"num_hidden_layers": 1, "layer_types": FULL},
            "layers.1.input.* is superfluous",
        ),
        ({"conv_kernel_size": 2}, "conv_kernel_size=2"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    target_folder: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    write_public(tmp_path / "public", "qwen3", **changes)
    model = tiny_model("qwen3", num_layers=6)
    with pytest.raises(ValueError, match=words):
        load_dflash(str(tmp_path / "public"), model, target_source=str(target_folder), **OPTIONS)


def test_another_target_is_refused_and_so_is_the_wrong_setting(
    target_folder: Path, tmp_path: Path
) -> None:
    model = tiny_model("qwen3", num_layers=6)
    write_public(
        tmp_path / "public",
        "qwen3",
        dflash_config={"mask_token_id": 3, "target_layer_ids": [1, 2, 3], "fingerprint": "0"},
    )
    source = str(tmp_path / "public")
    with pytest.raises(ValueError, match="trained for another target"):
        load_dflash(source, model, target_source=str(target_folder), **OPTIONS)
    with pytest.raises(ValueError, match=r"set dflash\.source"):
        load_drafter(source, target_source=source, dtype=torch.float32, device="cpu")


def test_layers_are_spaced_as_the_public_ones() -> None:
    assert spaced_layers(36, 5) == (1, 9, 17, 25, 33)
    assert spaced_layers(30, 5) == (1, 8, 14, 20, 27)
    assert spaced_layers(30, 1) == (15,)
    with pytest.raises(ValueError, match="too shallow"):
        spaced_layers(3, 2)


@pytest.mark.parametrize("layer_ids", [(1, 3), (4, 0), (2, 2)])
def test_the_chosen_layers_are_read_and_only_from_blocks_that_say_so(
    layer_ids: tuple[int, ...],
) -> None:
    """Every layer of the target adds its own number, so its output tells which it is."""
    target, drafter = make_pair(layer_ids=layer_ids)

    class Adding(nn.Module):
        def __init__(self, index: int, inner: nn.Module) -> None:
            super().__init__()
            self.index, self.inner = index, inner

        def forward(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
            self.inner(hidden, **options)
            return hidden * 0.0 + self.index

    backbone: Any = target.model.base_model
    for index in range(6):
        backbone.layers[index] = Adding(index, backbone.layers[index])
    target.forward([Block("plain", 0, TOKENS, 1)])
    assert not drafter._states
    target.forward([Block("a", 0, TOKENS, 1, is_read=True)])
    (features,) = drafter._states["a"].pending
    assert features.shape == (len(TOKENS), 2 * 32)
    assert features[:, ::32].unique(dim=0).tolist() == [list(map(float, layer_ids))]
    assert not any(layer._forward_hooks for layer in backbone.layers)


# --- the loop ---


def run_both(
    requests: list[dict[str, Any]], *, block_size: int = 4, family: str = "llama", **options: Any
) -> None:
    """``dflash`` must say what ``ar`` says, and draft."""

    def ask(mode: str) -> tuple[list[Any], list[tuple[int, ...]]]:
        target, drafter = make_pair(family, block_size=block_size)
        made: list[Request] = [
            make_request(f"{i}", mode=mode, **settings) for i, settings in enumerate(requests)
        ]
        results = decode(
            target,
            None,
            made,
            block_size=block_size,
            vocab_size=512,
            dflash=FeatureDrafting(drafter, is_noise_shared=True),
            **options,
        )
        names = [request.id for request in made]
        assert not drafter._states and not target._caches
        rounds = [r for name in names for r in results.last(name).rounds]
        return rounds, [results.tokens(name) for name in names]

    plain_rounds, expected = ask("ar")
    rounds, found = ask("dflash")
    assert found == expected
    assert all(r.num_drafts == 0 for r in plain_rounds)
    drafted = [r for r in rounds if r.num_drafts]
    assert drafted and all(
        r.kind == "hit" and r.draft_end_ns > r.draft_start_ns and r.num_passes == 1
        and r.draft_end_ns <= r.verify_start_ns
        for r in drafted
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
def test_greedy_answers_of_many_requests_are_those_of_plain_decoding(
    family: str, block_size: int
) -> None:
    run_both([{"prompt": p} for p in PROMPTS], block_size=block_size, family=family)


def test_stops_and_limits_inside_blocks_are_kept() -> None:
    target, _ = make_pair()
    whole = decode(target, None, [make_request(prompt=PROMPTS[1], mode="ar")], vocab_size=512)
    stops = sorted({*whole.tokens("a")[3:12]})
    requests = [{"prompt": PROMPTS[1], "stop_ids": [stop]} for stop in stops]
    requests += [{"prompt": PROMPTS[2], "max_tokens": n} for n in range(1, 8)]
    run_both(requests, block_size=8)


def test_at_a_temperature_one_seed_gives_one_text() -> None:
    settings = {"top_k": 40, "repetition_penalty": 1.2, "presence_penalty": 0.3}
    requests: list[dict[str, Any]] = [
        {"prompt": p, "seed": i, "temperature": 0.5 + 0.2 * i, **(settings if i % 2 else {})}
        for i, p in enumerate(PROMPTS)
    ]
    run_both(requests)


def test_never_slower_and_chunks_change_no_answer() -> None:
    requests = [{"prompt": tuple(range(4, 60)), "max_tokens": 90}, {"prompt": PROMPTS[0]}]
    run_both(requests, is_never_slower=True, prefill_chunk=7)


def test_drafts_that_are_right_are_accepted_and_shared_noise_is_used() -> None:
    """A drafter that knows the answer: at a temperature only the same noise draws it."""

    class Knowing:
        max_positions, block_size = 1000, 4

        def __init__(self, target: Target) -> None:
            self.target = target

        def draft(self, request: str, tokens: Any) -> torch.Tensor:
            known, rows = list(tokens), []
            for _ in range(3):
                logits = self.target.forward([Block("x", 0, tuple(known), 1)])[0].float()
                self.target.free("x")
                rows.append(logits)
                known.append(int(self.choose(logits, len(known))))
            return torch.cat(rows)

        def choose(self, logits: torch.Tensor, position: int) -> torch.Tensor:
            return draw(logits, Sampling(temperature=1.0, seed=7), position=position)[0]

    lengths = {}
    for is_shared in (True, False):
        target, _ = make_pair()
        policy = FeatureDrafting(Knowing(target), is_noise_shared=is_shared)
        request = make_request(mode="dflash", temperature=1.0, max_tokens=33)
        results = decode(target, None, [request], vocab_size=512, dflash=policy)
        rounds = [r for r in results.last("a").rounds if not r.is_prefill]
        lengths[is_shared] = len(rounds)
    assert lengths[True] == 8 and lengths[False] > 8


def test_the_mode_needs_its_drafter() -> None:
    target, _ = make_pair()
    scheduler = make_scheduler(target, None, Results())
    with pytest.raises(ValueError, match=r"set dflash\.source"):
        scheduler.submit(make_request(mode="dflash"))
