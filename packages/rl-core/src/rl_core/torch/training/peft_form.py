"""Adapters as files in the format of `peft`, in the form that peft's own loading finds on tensors without data."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rl_core.model import HEADLESS_ROLES, AdapterSettings, Role
from rl_core.model_config import LoraConfig, ModelConfig
from rl_core.torch.files.language_part import LANGUAGE_PREFIX
from rl_core.torch.process_group import on_rank0
from rl_core.torch.training.backend import RankMesh, RankWeights
from rl_core.torch.training.lora import (
    ADAPTER_CONFIG,
    ADAPTER_PREFIX,
    ADAPTER_WEIGHTS,
    LORA_A,
    LORA_B,
    WEIGHT,
    AdapterSize,
    InitialFactors,
    flat_factors,
    peft_layers,
    size_of,
)

ADAPTER = "default"
SCORE = "score"
"""Name of the head of models without a language-model head."""
SHOWN = 4
"""Maximum number of layers that a message lists."""


class AdapterExport:
    """Writes the adapters of a model, and a score head that trains with them.

    `peft.PeftModel.from_pretrained` and vLLM load them.

    Args:
        weights: Weights of the model.
        config: The model and its adapters.
        role: Role of the model.
        folder: Folder of the model's files, which the adapters are attached to.
        mesh: Mesh of the model.
        initial: The factors that were taken out of the weights; None if the weights are those of the files. They are
            subtracted, so that the adapter fits the files: `up @ down - up_0 @ down_0` is one product of twice the
            rank.
    """

    def __init__(
        self,
        weights: RankWeights,
        *,
        config: ModelConfig,
        role: Role,
        folder: Path,
        mesh: RankMesh,
        initial: InitialFactors | None = None,
    ) -> None:
        self._weights, self._initial = weights, initial
        self._config, self._role = config, role
        self._folder = folder
        self._mesh = mesh
        self._form: PeftForm | None = None
        self._is_checked = False

    def check(self) -> None:
        """Find out on rank 0 how peft loads these adapters; collective.

        Raises:
            ValueError: If it cannot load them.
        """
        specs = self._weights.adapter_specs("float32")

        def find() -> None:
            factors = {spec.name: torch.empty(spec.shape, device="meta") for spec in specs}
            if self._initial is not None:
                # Twice as many rows and columns, as after a subtraction.
                for name in _products(factors):
                    factors[name] = torch.cat([factors[name]] * 2, _dim_of_rank(name))
            self._form = peft_form(self._config, self._role, factors, self._folder)

        on_rank0(self._mesh.control, find)
        self._is_checked = True

    def write(
        self,
        path: Path,
        factors: Iterable[tuple[str, Tensor | None]] | None = None,
        settings: AdapterSettings | None = None,
    ) -> None:
        """Write the adapters into a folder; collective. Rank 0 brings them together in host memory and writes.

        Args:
            path: The folder.
            factors: Factors of one of several adapters; the factors of `weights` if None.
            settings: Its rank and alpha; the config's if None.
        """
        if not self._is_checked:
            self.check()
        gathered: dict[str, Tensor] = {}
        for name, tensor in self._weights.adapters() if factors is None else factors:
            if self._mesh.rank == 0:
                assert tensor is not None, f"{name} did not reach the rank that writes it"
                gathered[name] = tensor.cpu()

        def write() -> None:
            assert self._form is not None
            path.mkdir(parents=True, exist_ok=True)
            for name in _products(gathered) if self._initial is not None else ():
                gathered[name] = torch.cat([gathered[name], self._subtracted(name)], _dim_of_rank(name))
            described = self._form.described
            if settings is not None:
                described = {**described, "r": settings.rank, "lora_alpha": settings.alpha}
                for name in _products(gathered):
                    gathered[name] = gathered[name].narrow(_dim_of_rank(name), 0, settings.rank)
            save_file(self._form.files(gathered), path / ADAPTER_WEIGHTS, metadata={"format": "pt"})
            (path / ADAPTER_CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")

        on_rank0(self._mesh.control, write)

    def _subtracted(self, name: str) -> Tensor:
        """Return the initial value of a factor, with the sign that subtracts the product."""
        assert self._initial is not None
        down, up = self._initial.principal(name.removesuffix(LORA_A).removesuffix(LORA_B) + WEIGHT)
        return down if name.endswith(LORA_A) else -up


def _products(tensors: Iterable[str]) -> list[str]:
    """Return the names of tensors that are factors of a product."""
    return [name for name in tensors if name.endswith((LORA_A, LORA_B))]


def _dim_of_rank(name: str) -> int:
    """Return the dim of a factor that has the rank of the adapter as its extent."""
    return 0 if name.endswith(LORA_A) else 1


def adapter_config(
    config: ModelConfig,
    role: Role,
    targets: Sequence[str],
    parameters: Sequence[str] = (),
    auto_mapping: Mapping[str, str] | None = None,
    sizes: Mapping[str, AdapterSize] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the contents of `adapter_config.json`, which `peft` and vLLM read.

    Args:
        config: The model and its adapters.
        role: Role of the model, which has a score head in the place of its language-model head or not.
        targets: Name endings of the layers that have an adapter.
        parameters: Names of the weights that have one: stacked ones of experts, and weights of linear layers that peft
            would take for experts.
        auto_mapping: Class of a composite model for `AutoPeftModel` classes; None for other models, which
            they load by the task.
        sizes: Sizes of the adapters by the names of their layers or parameters.
    """
    lora = config.lora_cfg
    whole = size_in_files(AdapterSize(lora.dim, lora.alpha, lora.scale), lora)
    scores = role in HEADLESS_ROLES
    task = "SEQ_CLS" if scores else "CAUSAL_LM"
    return {
        "peft_type": "LORA",
        "task_type": task if auto_mapping is None else None,
        "auto_mapping": auto_mapping,
        "base_model_name_or_path": config.model_name,
        "inference_mode": True,
        "r": whole.dim,
        "lora_alpha": _plain(whole.alpha),
        # peft adds an adapter of a parameter to the parameter itself, so that there is no input to drop.
        "lora_dropout": 0.0 if parameters else lora.dropout,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "target_modules": list(targets),
        "target_parameters": list(parameters) or None,
        "modules_to_save": [SCORE] if scores else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "rank_pattern": {name: size.dim for name, size in sizes.items() if size.dim != whole.dim},
        "alpha_pattern": {name: _plain(size.alpha) for name, size in sizes.items() if size.alpha != whole.alpha},
    }


def size_in_files(size: AdapterSize, lora: LoraConfig) -> AdapterSize:
    """Return the size that an adapter has in files. It is twice as large, at the same scale, if the factors that it
    started from are subtracted."""
    if lora.init != "pissa":
        return size
    return AdapterSize(2 * size.dim, size.alpha * (math.sqrt(2) if lora.use_rslora else 2), size.scale)


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number


class PeftForm(NamedTuple):
    """Names and config of the adapters of a model as peft loads them.

    Args:
        described: Config of the adapters (`adapter_config`).
        prefixes: Start of layer names in the trained model, and in the model that adapters are attached to.
            They differ if a composite model is trained as its language model.
    """

    described: dict[str, Any]
    prefixes: tuple[str, str] = ("", "")

    def files(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the file of an adapter.

        Args:
            factors: Factors of all adapters by the name of their weight, as `RankWeights.adapters` gives them.
        """
        return {ADAPTER_PREFIX + _renamed(name, self.prefixes): factor for name, factor in _flat(factors).items()}


def peft_form(config: ModelConfig, role: Role, factors: Mapping[str, Tensor], folder: Path) -> PeftForm:
    """Return the form that peft loads the adapters of a model from, onto the layers that they are trained on.

    Args:
        config: The model and its adapters.
        role: Role of the model.
        factors: Factors of all adapters by name, whose shapes decide.
        folder: Folder of the model's files.

    Raises:
        ValueError: If peft cannot load them in any form, with its reason.
    """
    flat = {name: torch.empty(factor.shape, device="meta") for name, factor in _flat(factors).items()}
    layers = {name.removesuffix(LORA_A) for name in flat if name.endswith(LORA_A)}
    bases = list(_bases(folder, role, layers, is_whole=config.vision.enabled))
    if not bases:
        raise ValueError(
            "lora_cfg.enabled: transformers has no class that loads this model for its role "
            f"({role}), so that nobody could attach the adapters; set lora_cfg.enabled=false"
        )
    stacks = _stacks(factors)
    names = {layer: layer for layer in layers} | {layer: weight for weight, layer in peft_layers(stacks).items()}
    sizes = {layer: size_in_files(size_of(name, config.lora_cfg), config.lora_cfg) for layer, name in names.items()}
    trial = _Trial(config, role, flat, sizes, stacks)
    problem = ""
    found: list[tuple[int, PeftForm]] = []
    for base in bases:
        try:
            form = trial.form_on(base)
        except ValueError as error:
            problem = problem or str(error)
            continue
        fits = [not trial.misplaced(form, other) for other in bases if other is not base]
        if all(fits):
            return form
        found.append((sum(fits), form))
    if not found:
        raise ValueError(problem)
    return max(found, key=lambda each: each[0])[1]


class _Base(NamedTuple):
    """A model that transformers loads from the files that adapters are attached to.

    Args:
        build: Function that returns a new one without data.
        modules: Names of all of its modules.
        prefixes: Start of layer names in the trained model, and here.
        auto_mapping: Class of a composite model; None for others.
    """

    build: Callable[[], nn.Module]
    modules: list[str]
    prefixes: tuple[str, str]
    auto_mapping: dict[str, str] | None


class _Trial(NamedTuple):
    """The adapters of a model, to be loaded by peft.

    Args:
        factors: Tensors without data, by name in peft if its layers are called as in the trained model.
        sizes: Sizes of the adapters by the layers of peft, named likewise.
        stacks: Weights of stacked experts with an adapter.
    """

    config: ModelConfig
    role: Role
    factors: Mapping[str, Tensor]
    sizes: Mapping[str, AdapterSize]
    stacks: Sequence[str]

    @property
    def layers(self) -> set[str]:
        """Layers of peft with an adapter."""
        return set(self.sizes)

    def form_on(self, base: _Base) -> PeftForm:
        """Return the form that peft loads onto a base.

        Some families have layers that peft takes for experts of an earlier version of transformers. Their weights are
        named as parameters, which it leaves as they are.

        Raises:
            ValueError: With the reason of peft.
        """
        linear = self.layers - set(peft_layers(self.stacks).values())
        form = self._form(base, linear, [])
        misplaced = self.misplaced(form, base)
        if not misplaced:
            return form
        for weights in (misplaced & linear, linear):
            form = self._form(base, linear - weights, sorted(weights))
            if not (left := self.misplaced(form, base)):
                return form
        try:
            self._loaded(form, base)
            ordered = sorted(left)
            more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
            reason = f"it attaches those of {', '.join(ordered[:SHOWN])}{more} to other layers, or to none"
        except (ValueError, RuntimeError, KeyError) as error:
            reason = " ".join(str(error).split())
        raise ValueError(
            "lora_cfg: checkpoints have adapters in the format of peft, which cannot load those of this model: "
            f"{reason}. Set lora_cfg.target_modules to other layers, or leave these out by lora_cfg.exclude_modules"
        )

    def misplaced(self, form: PeftForm, base: _Base) -> set[str]:
        """Return the layers whose adapter does not reach them when peft loads a form onto a base.

        These are all layers if peft does not load it, or has more layers or factors than there are adapters.
        """
        try:
            found, surplus = self._loaded(form, base)
        except (ValueError, RuntimeError, KeyError):
            return self.layers
        expected = {_renamed(layer, base.prefixes): layer for layer in self.layers}
        missed = {
            layer
            for name, layer in expected.items()
            if name not in found or not _is_alike(found[name], self.sizes[layer])
        }
        return self.layers if not missed and (surplus or found.keys() - expected.keys()) else missed

    def _form(self, base: _Base, linear: set[str], weights: Sequence[str]) -> PeftForm:
        named = {_renamed(layer, base.prefixes) for layer in linear}
        parameters = [_renamed(name, base.prefixes) for name in (*self.stacks, *(each + WEIGHT for each in weights))]
        targets = endings(named, set(base.modules) - named)
        # peft looks up the size of a parameter's adapter by the name of the parameter.
        owners = {layer: weight for weight, layer in peft_layers(self.stacks).items()}
        owners |= {layer: layer + WEIGHT for layer in weights}
        sizes = {_renamed(owners.get(layer, layer), base.prefixes): size for layer, size in self.sizes.items()}
        described = adapter_config(self.config, self.role, targets, parameters, base.auto_mapping, sizes)
        return PeftForm(described, base.prefixes)

    def _loaded(self, form: PeftForm, base: _Base) -> tuple[dict[str, tuple[int, float]], list[str]]:
        """Load the factors by peft.

        Returns:
            Rank and scale of the adapters that peft attaches with their factors, by layer, and names of the tensors
            that find no place, or are missing next to the factors.

        Raises:
            ValueError, RuntimeError, KeyError: Of peft.
        """
        # The import takes seconds, which models without adapters do not pay.
        from peft import LoraConfig as PeftConfig
        from peft import PeftModel, set_peft_model_state_dict
        from peft.mapping_func import MODEL_TYPE_TO_PEFT_MODEL_MAPPING
        from peft.tuners.lora import LoraLayer

        described = PeftConfig(**deepcopy(form.described))  # peft writes into the patterns of its config
        kind = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(described.task_type, PeftModel)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Peft warns of mismatches that are judged below.
            model = kind(base.build(), described, adapter_name=ADAPTER, low_cpu_mem_usage=True)
            result = set_peft_model_state_dict(model, form.files(self.factors), ADAPTER, low_cpu_mem_usage=True)
        unfilled = {
            name.removeprefix(ADAPTER_PREFIX).partition(".lora_")[0] for name in result.missing_keys if ".lora_" in name
        }
        found = {
            name: (int(module.r[ADAPTER]), float(module.scaling[ADAPTER]))
            for name, module in model.get_base_model().named_modules()
            if isinstance(module, LoraLayer) and name not in unfilled
        }
        unsaved = [name for name in result.missing_keys if ".modules_to_save." in name]
        return found, [*result.unexpected_keys, *unsaved]


def _is_alike(found: tuple[int, float], size: AdapterSize) -> bool:
    dim, scale = found
    return dim == size.dim and abs(scale - size.scale) <= 1e-6 * size.scale


def endings(layers: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return name endings that these layers have and no others.

    The end is the last part of a name if that will do, otherwise all of it.
    """
    taken = {name.rpartition(".")[2] for name in others}
    lasts = {name: name.rpartition(".")[2] for name in layers}
    return sorted({name if last in taken else last for name, last in lasts.items()})


def _bases(folder: Path, role: Role, layers: set[str], *, is_whole: bool) -> Iterator[_Base]:
    """Yield the models that transformers loads from a folder for a role."""
    import transformers  # It comes with the backends.

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    vars(config).pop("quantization_config", None)
    is_composite = config.get_text_config() is not config
    autos = ["AutoModelForImageTextToText", "AutoModelForMultimodalLM"] if is_composite else []
    if role in HEADLESS_ROLES:
        autos, config.num_labels = ["AutoModelForSequenceClassification"], 1
    elif not is_whole:
        autos.append("AutoModelForCausalLM")
    seen = set()
    for name in autos:
        auto: Any = getattr(transformers, name)
        if type(config) not in auto._model_mapping:
            continue

        def build(auto: Any = auto) -> nn.Module:
            with torch.device("meta"):
                model: nn.Module = auto.from_config(type(config).from_dict(config.to_dict()))
            return model

        model = build()
        if type(model) in seen:
            continue
        seen.add(type(model))
        modules = [module for module, _ in model.named_modules()]
        prefixes = ("", "") if is_whole or not is_composite else _prefixes(modules, layers)
        is_of_task = role in HEADLESS_ROLES or not is_composite
        mapping = {"base_model_class": type(model).__name__, "parent_library": "transformers"}
        yield _Base(build, modules, prefixes, None if is_of_task else mapping)


def _prefixes(modules: Sequence[str], layers: set[str]) -> tuple[str, str]:
    """Return the start of layer names of a language model, and of the same layers in a model that has it.

    Args:
        modules: Names of all modules of the latter model.
        layers: Names of layers in the language model.
    """
    first = min(layers)
    own = re.search(r"(?<!\w)\w+\.\d+\.", first)
    start = first[: own.start()] if own else ""
    known = set(modules)
    rests = [layer.removeprefix(start).split(".base_layer")[0] for layer in layers if layer.startswith(start)]
    candidates = [f"{name}." if name else "" for name in modules]
    found = [prefix for prefix in candidates if all(prefix + rest in known for rest in rests)]
    # A tower, or layers between it and the text, may have layers of the same names.
    of_text = [prefix for prefix in found if LANGUAGE_PREFIX.match(prefix)]
    return start, next(iter([*of_text, *found]), start)


def _renamed(name: str, prefixes: tuple[str, str]) -> str:
    own, other = prefixes
    return other + name.removeprefix(own) if name.startswith(own) and own != other else name


def _stacks(factors: Mapping[str, Tensor]) -> list[str]:
    """Return the weights of stacked experts among the weights that have factors."""
    return [name.removesuffix(LORA_A) for name, down in factors.items() if name.endswith(LORA_A) and down.dim() > 2]


def _flat(factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return factors by name in peft, with stacked experts as matrices."""
    found = dict(factors)
    for weight, layer in peft_layers(_stacks(factors)).items():
        flat = flat_factors(found.pop(weight + LORA_A), found.pop(weight + LORA_B))
        found.update(zip((layer + LORA_A, layer + LORA_B), flat, strict=True))
    return {name: factor.contiguous() for name, factor in found.items()}
