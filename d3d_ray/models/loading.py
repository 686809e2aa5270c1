"""Where models come from: a Hugging Face folder or name, a ``.gguf`` file, or an embedded one."""

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.utils import cached_file

from d3d_ray.models.cache import check_can_cut
from d3d_ray.models.embedded import PREFIX, embedded_folder, shipped_folder
from d3d_ray.models.hub import must_use_cache
from d3d_ray.models.target import Target


@dataclass(frozen=True, slots=True)
class _Files:
    """The arguments by which transformers finds a model's files."""

    name: str
    gguf_file: str | None
    is_local: bool

    @property
    def options(self) -> dict[str, object]:
        options: dict[str, object] = {"trust_remote_code": False}
        if self.is_local:
            options["local_files_only"] = True
        if self.gguf_file is not None:
            options["gguf_file"] = self.gguf_file
        return options


def load_target(
    source: str,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    num_devices: int = 1,
    max_context: int | None = None,
) -> Target:
    """Load the target; ``num_devices > 1`` spreads its layers over all visible GPUs.

    ``source`` is a Hugging Face folder or hub name, a path to a ``.gguf`` file, or
    ``embedded:NAME``. Raises ``ValueError`` for a source that is not there and
    for a model whose KV cache cannot be cut back.
    """
    model = load_causal_lm(source, dtype=dtype, device=device, num_devices=num_devices)
    return Target(
        model,
        vocab_size=count_token_ids(load_tokenizer(source)),
        stop_ids=stop_ids(model),
        max_context=max_context,
    )


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a source as in :func:`load_target`."""
    with _files_of(source) as files:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            files.name, **files.options
        )
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # What is made when there are no files.
        raise ValueError(f"{source!r} has no tokenizer: put its files, tokenizer.json, there")
    if files.gguf_file is not None:
        _restore_digit_split(tokenizer, Path(files.name) / files.gguf_file)
    return tokenizer


def load_config(source: str) -> PretrainedConfig:
    """The config of a source as in :func:`load_target`."""
    with _files_of(source) as files:
        config: PretrainedConfig = AutoConfig.from_pretrained(files.name, **files.options)
    return config


def load_causal_lm(
    source: str,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    num_devices: int = 1,
) -> PreTrainedModel:
    """The causal LM of a source as in :func:`load_target`, in eval mode."""
    with _files_of(source) as files:
        options = files.options
        if files.gguf_file is None:
            # Refused before gigabytes are read. A GGUF's config takes as long as its weights.
            config = AutoConfig.from_pretrained(files.name, **options)
            check_can_cut(config)
            options["config"] = config
        else:
            options["quantization_config"] = GgufConfig(dequantize=True)
        if num_devices > 1:
            options["device_map"] = "auto"
        elif torch.device(device).type != "cpu":
            options["device_map"] = {"": torch.device(device)}
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            files.name, dtype=dtype, **options
        )
    return model.eval()


def read_tensors(source: str, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a source as in :func:`load_target`, as they are stored; None = all of them.

    Names that the source does not have are left out.
    """
    tensors = {}
    with _files_of(source) as files:
        if files.gguf_file is not None:  # Its tensors have other names, and are quantised.
            state = load_causal_lm(source, dtype=torch.bfloat16, device="cpu").state_dict()
            return {name: state[name] for name in state if names is None or name in names}
        for file in _list_weights(files):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():
                    if names is None or name in names:
                        tensors[name] = opened.get_tensor(name)
    return tensors


def save_model(model: PreTrainedModel, folder: str | Path, **options: Any) -> None:
    """``save_pretrained``, which imports DeepSpeed where that is installed; from any rank."""
    if not torch.cuda.is_available():
        # Otherwise DeepSpeed says on stdout that it found no GPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Otherwise transformers silently writes nothing from other ranks than 0.
    model.should_save_on_this_rank = lambda is_main_process: True  # type: ignore[method-assign]
    model.save_pretrained(folder, **options)


def stop_ids(model: PreTrainedModel) -> frozenset[int]:
    """The ids that end an answer: the generation config's, else the config's, perhaps none."""
    for config in (model.generation_config, model.config.get_text_config(decoder=True)):
        eos = getattr(config, "eos_token_id", None)
        if isinstance(eos, int):
            return frozenset({eos})
        if eos is not None:
            return frozenset(eos)
    return frozenset()


def count_token_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """The largest id of the tokenizer, added tokens included, plus one."""
    return max(tokenizer.get_vocab().values()) + 1


@contextmanager
def _files_of(source: str) -> Iterator[_Files]:
    """To be read inside; a damaged one is an error that names it."""
    files = _find(source)
    try:
        yield files
    except (OSError, ValueError, SafetensorError) as error:
        if source.startswith(PREFIX) and shipped_folder(source) is None:
            raise ValueError(
                f"the copy of {source} in {files.name} is damaged; delete that folder, and it is "
                f"made again: {error}"
            ) from error
        if isinstance(error, SafetensorError):
            raise ValueError(f"the weights of {source!r} are damaged: {error}") from error
        raise


def _find(source: str) -> _Files:
    if (shipped := shipped_folder(source)) is not None:
        return _Files(str(shipped), None, is_local=True)
    if source.startswith(PREFIX):
        folder = embedded_folder(source.removeprefix(PREFIX), _convert_gguf)
        return _Files(str(folder), None, is_local=True)
    path = Path(source).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _Files(str(path.absolute().parent), path.name, is_local=True)
    if path.is_dir():
        return _Files(str(path), None, is_local=True)
    if path.suffix == ".gguf" or source.startswith(("/", ".", "~")) or source.count(os.sep) > 1:
        raise ValueError(f"there is no model folder or .gguf file {source!r}; correct the path")
    return _Files(source, None, is_local=must_use_cache(source))


def _list_weights(files: _Files) -> list[str]:
    def find(name: str) -> str | None:
        found: str | None = cached_file(
            files.name,
            name,
            local_files_only=files.is_local,
            _raise_exceptions_for_missing_entries=False,
        )
        return found

    index = find("model.safetensors.index.json")
    if index is None:
        names = ["model.safetensors"]
    else:
        names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    paths = [find(name) for name in names]
    if None in paths:
        raise ValueError(f"{files.name!r} has no {names[paths.index(None)]}; convert its weights")
    return [path for path in paths if path is not None]


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a Hugging Face folder: bf16 weights, tokenizer, chat template."""
    model = load_causal_lm(str(gguf), dtype=torch.bfloat16, device="cpu")
    save_model(model, folder)
    load_tokenizer(str(gguf)).save_pretrained(folder)


_SPLITS_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r"})


def _restore_digit_split(tokenizer: PreTrainedTokenizerBase, gguf: Path) -> None:
    """Cut digits off before the byte-level split, as these vocabularies were learned.

    transformers does not know these pre-tokenizers and leaves the step out. Then white space
    before a digit is cut otherwise than the model has seen it: ``"\\n\\n1"`` becomes two tokens
    for the line ends instead of one.
    """
    metadata, _ = read_gguf_metadata(str(gguf))
    if metadata.get("tokenizer.ggml.pre") in _SPLITS_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
