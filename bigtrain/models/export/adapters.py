"""Exporting trained adapters: as a peft directory, or merged into the base weights."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from bigtrain.errors import ModelError
from bigtrain.models.build import empty_model
from bigtrain.models.configuration import auto_class, scores_samples
from bigtrain.models.export.verified import (
    CARD,
    Destination,
    Probe,
    compare_logits,
    relative_difference,
    writing_directory,
)
from bigtrain.models.file_names import ADAPTER_CONFIG, GENERATION_CONFIG
from bigtrain.models.layers.adapter_names import (
    ADAPTER,
    COPY,
    MAGNITUDE,
    parameter_layers,
    peft_name,
)
from bigtrain.models.layers.adapter_targets import find_parameters, find_saved, find_targets
from bigtrain.models.layers.adapters import add_adapters, file_config
from bigtrain.models.layers.principal_adapters import INITIAL, matrices_on_base
from bigtrain.models.parallel.grouped_experts import fit_experts
from bigtrain.models.text_ids import write_stop_ids
from bigtrain.models.weights.export_hf import DTYPES, write_tokenizer
from bigtrain.models.weights.import_hf import Weights
from bigtrain.models.weights.lazy_tensors import LazyTensor
from bigtrain.models.weights.quantized import bits_and_bytes, compute_plainly, magnitude
from bigtrain.settings.hf_config_keys import listed_ids
from bigtrain.settings.sections.adapters import AdaptersSection

ADAPTER_WEIGHTS = "adapter_model.safetensors"


def export_adapter(
    weights: Mapping[str, torch.Tensor],
    section: AdaptersSection,
    base: str,
    hf_config: PreTrainedConfig,
    destination: Destination,
    probe: Probe,
) -> list[str]:
    """Write a directory that peft's `PeftModel.from_pretrained` loads on top of `base`.

    Parameters: `weights`, trained weights by the run's names; `base`, a directory or hub name,
    recorded unchanged; `destination`, whose missing dtype means float32; all further parameters and
    errors as in `export_model`. The directory appears only after plain peft has loaded it, with the
    base in memory, and gives the trained model's logits for `probe`. Returns notes as
    `export_model`. Called by one process.
    """
    output, dtype = destination.output, destination.dtype or "float32"
    adapter_tensors = adapter_state(weights, dtype)
    if not adapter_tensors:
        raise ModelError(f"{output}: the checkpoint holds no adapters")
    with writing_directory(output, replace=destination.replace) as directory:
        # Adapters with their configuration, the tokenizer, and generation settings.
        directory.mkdir(parents=True)
        _write_config(directory, section, base, hf_config)
        save_file(adapter_tensors, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        # safetensors writes with permissions for the owner only, whatever the umask is.
        shutil.copymode(directory / ADAPTER_CONFIG, directory / ADAPTER_WEIGHTS)
        write_tokenizer(destination.tokenizer, directory, output)
        notes: list[str] = []
        if not scores_samples(hf_config):
            settings_file = destination.generation_config
            if settings_file is not None and settings_file.is_file():
                shutil.copyfile(settings_file, directory / GENERATION_CONFIG)
            notes += write_stop_ids(directory, hf_config)
        # Verify the files with plain peft.
        with torch.no_grad(), _without_future_warnings():
            model = _load_with_adapters(base, hf_config, directory, DTYPES[probe.dtype], section)
            notes += compare_logits(model, probe, output, dtype)
        if not scores_samples(hf_config):
            # transformers, peft and vLLM read the base's settings, and settings next to adapters
            # only if a call names them: generation may not stop where training texts end.
            settings = json.loads((directory / GENERATION_CONFIG).read_text(encoding="utf-8"))
            base_ids = listed_ids(model.get_base_model().generation_config.eos_token_id)
            missing = [n for n in listed_ids(settings.get("eos_token_id")) if n not in base_ids]
            if missing:
                notes.append(
                    "the base's generation settings, which transformers, peft and vLLM read, do "
                    f"not stop at token {', '.join(map(str, missing))}, where training texts end "
                    "-> generate(generation_config=GenerationConfig.from_pretrained("
                    f"{str(output)!r})), vllm serve --generation-config {output}, or export with "
                    "--merge"
                )
        if destination.card:
            card = "\n".join([destination.card, *notes])
            (directory / CARD).write_text(card, encoding="utf-8")
    return notes


@torch.no_grad()
def probe_beside(
    weights: Mapping[str, torch.Tensor],
    section: AdaptersSection,
    base: str,
    hf_config: PreTrainedConfig,
    probe: Probe,
) -> tuple[Probe, float]:
    """Return a probe with the logits of plain peft with the adapters on the unquantized `base`,
    although the run trained the adapters on a quantized base; and the `relative_difference` from
    the logits of `probe`. Parameters as in `export_adapter`."""
    with TemporaryDirectory() as name, _without_future_warnings():
        directory = Path(name)
        _write_config(directory, section, base, hf_config)
        save_file(adapter_state(weights, "float32"), directory / ADAPTER_WEIGHTS)
        unquantized = section.model_copy(update={"quantization": "none"})
        dtype = DTYPES[probe.dtype]
        model = _load_with_adapters(base, hf_config, directory, dtype, unquantized).eval()
        logits = model(input_ids=probe.input_ids, use_cache=False).logits.float()
    computed = Probe(probe.input_ids, logits, probe.dtype)
    return computed, relative_difference(logits, probe.logits)


def adapter_state(weights: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """Return the adapters among a run's `weights`, by their names in peft's files, in memory.
    Adapters of PiSSA are converted to adapters of the base's weights, with twice the rank
    (`matrices_on_base`)."""
    tensors = {}
    for name, tensor in sorted(weights.items()):
        if f".{ADAPTER}." in name:  # a checkpoint holds the base's buffers as well
            layer, lora, matrix = name.partition(".lora_")  # `matrix` begins with A or B
            is_pissa = bool(lora) and f"{layer}.{INITIAL['lora_A']}" in weights
            if is_pissa:
                tensor = matrices_on_base(weights, layer)[f"lora_{matrix[0]}"]
            tensor = tensor.read() if isinstance(tensor, LazyTensor) else tensor.detach()
            tensors[peft_name(name)] = tensor.to(DTYPES[dtype]).contiguous()
    return tensors


def merged_weights(
    weights: Mapping[str, torch.Tensor],
    section: AdaptersSection,
    base: Weights,
    hf_config: PreTrainedConfig,
) -> dict[str, torch.Tensor]:
    """Return the base's weights with the trained adapters merged, by Hugging Face name, in float32.
    If `weights` are lazy, a read of a merged weight computes the weight, and this function reads
    nothing. Raises ModelError if an adapter is missing.

    LoRA (Hu et al. 2021, arXiv 2106.09685): ``W + scale * B A``. DoRA (Liu et al. 2024, arXiv
    2402.09353): ``m * V / ||V||`` with V = ``W + scale * B A``, norms over every output's weights.
    """
    model = empty_model(hf_config)
    merged: dict[str, torch.Tensor] = dict(base.tensors)

    def trained(name: str) -> torch.Tensor:
        try:
            return weights[name]
        except KeyError as error:
            raise ModelError(f"the checkpoint holds no adapter {name}") from error

    for name in find_targets(model, section).names:
        for matrix in INITIAL:  # raises an error for a missing matrix
            trained(f"{name}.{matrix}.{ADAPTER}.weight")
        matrices = matrices_on_base(weights, name)
        product = (matrices["lora_B"] @ matrices["lora_A"]) * section.scale
        is_transposed = isinstance(model.get_submodule(name), Conv1D)
        if is_transposed:
            product = product.T
        weight_name = f"{name}.weight"
        weight = base.tensors[weight_name].to(torch.float32) + product
        if section.dora:
            factor = trained(name + MAGNITUDE) / magnitude(weight, transposed=is_transposed)
            weight = weight * (factor if is_transposed else factor.unsqueeze(1))
        merged[weight_name] = weight
    # Stacked weights [experts, ...]: peft stores an adapter for every expert in two matrices.
    if find_parameters(model, section).names:
        adapted = empty_model(hf_config)
        with torch.device("meta"):
            add_adapters(adapted, section, lambda _: 0)
        for weight_name, (name, layer) in parameter_layers(adapted).items():
            all_a = trained(f"{name}.lora_A.{ADAPTER}.weight")  # [experts x rank, in]
            all_b = trained(f"{name}.lora_B.{ADAPTER}.weight")  # [out, rank x experts]
            stacked_a = all_a.reshape(layer.num_experts, -1, all_a.shape[-1])
            stacked_b = all_b.reshape(all_b.shape[0], -1, layer.num_experts).permute(2, 0, 1)
            product = torch.bmm(stacked_b, stacked_a) * section.scale  # [experts, out, in]
            if product.shape[1:] != base.tensors[weight_name].shape[1:]:
                product = product.transpose(1, 2)
            merged[weight_name] = base.tensors[weight_name].to(torch.float32) + product
    # Copies that were trained in full replace the base's weights.
    for module_name in find_saved(model, section).names:
        for name, _ in model.get_submodule(module_name).named_parameters():
            merged[f"{module_name}.{name}"] = trained(f"{module_name}{COPY}{name}")
    return merged


def _write_config(
    directory: Path, section: AdaptersSection, base: str, hf_config: PreTrainedConfig
) -> None:
    """Write peft's configuration file for adapters of `section` on `base` into `directory`."""
    config: Any = file_config(empty_model(hf_config), section)
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(directory)
    path = directory / ADAPTER_CONFIG
    values = json.loads(path.read_text())
    # peft writes sets, in an order that differs from run to run.
    for key in ("target_modules", "target_parameters", "modules_to_save"):
        if values.get(key):
            values[key] = sorted(values[key])
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _load_with_adapters(
    base: str,
    hf_config: PreTrainedConfig,
    directory: Path,
    dtype: torch.dtype,
    section: AdaptersSection,
) -> Any:
    """Return peft's model of `base`, quantized as in `section`, with the adapters in
    `directory`."""
    from peft import PeftModel

    options: dict[str, Any] = {"config": copy.deepcopy(hf_config), "dtype": dtype}
    if section.is_quantized:
        options |= {"quantization_config": bits_and_bytes(section, dtype), "device_map": "cpu"}
    model = auto_class(hf_config).from_pretrained(base, **options)
    compute_plainly(model)
    fit_experts(model)  # grouped products do not take every width
    return PeftModel.from_pretrained(model, str(directory), autocast_adapter_dtype=False)


@contextmanager
def _without_future_warnings() -> Iterator[None]:
    """Suppress warnings: peft 0.21 uses deprecated names of transformers 5.23."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
