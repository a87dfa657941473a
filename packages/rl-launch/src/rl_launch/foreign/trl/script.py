"""The arguments that a Python script gives TRL's trainers. The script is parsed, and never run."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.config.tree import read_text, reason
from rl_core.errors import ConfigError
from rl_launch.foreign.translation import Fate, ScriptLine
from rl_launch.foreign.trl.calls import CALLS, METHODS, QUANTIZED, set_known, stem_of
from rl_launch.foreign.trl.reading import Call, ScriptReading
from rl_launch.foreign.trl.values import SCRIPTS, Data, Thing, is_constant, is_made, plain, role_of
from rl_launch.foreign_keys.table import table

_IGNORED_LOADING = ("device_map", "low_cpu_mem_usage", "trust_remote_code", "use_cache")
"""Entries of `model_init_kwargs` that do not change which model is trained."""
_DATA = {"train_dataset": "data.train", "eval_dataset": "data.validation"}

MAX_SCRIPT_BYTES = 1 << 19
"""Maximum size of a script."""
HELD_OUT = "the rows that train_dataset leaves out"
"""Value of `eval_dataset` if the script splits one dataset."""


@dataclass(frozen=True)
class Script:
    """A script that was read.

    Args:
        algorithm: Name of the algorithm here.
        values: Arguments by the names of TRL's command line; datasets under `train_dataset` and `eval_dataset`.
        computed: Arguments that the script computes.
        checks: Lines that are listed for the user to check.
        refused: Lines that ask for features that are not offered.
        lines: Result for each statement.
        gpus: Number of processes that the command starts; None if it does not contain it.
    """

    algorithm: str
    values: dict[str, Any]
    computed: frozenset[str]
    checks: tuple[ScriptLine, ...]
    refused: tuple[ScriptLine, ...]
    lines: tuple[ScriptLine, ...]
    gpus: int | None = None


def read_script(path: Path, flags: Mapping[str, Any] | None = None) -> Script:
    """Read a script.

    Args:
        path: The script.
        flags: Arguments of the command that starts it, if it is known.

    Raises:
        ConfigError: If it cannot be read, or does not train with exactly one trainer that is imported.
    """
    text = read_text(path, str(path), MAX_SCRIPT_BYTES)
    too_deep = f"{path}: its expressions are nested too deeply to be read"
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise ConfigError(f"{path} is not valid Python: line {line}: {reason(error).partition(' (<')[0]}") from None
    except (RecursionError, MemoryError):  # the parser has its own stack
        raise ConfigError(too_deep) from None
    reading = ScriptReading(text, path.parent, flags, calls=CALLS, methods=METHODS, set_known=set_known)
    try:
        reading.run(tree.body)
        if not reading.trainers and not reading.others:
            reading.run_uncalled()
    except RecursionError:
        raise ConfigError(too_deep) from None
    for name, line in reading.others.items():
        raise ConfigError(f"{path}: {name} (line {line}) is not imported: {SCRIPTS['others'][stem_of(name)]}")
    trainers = reading.trainers
    used: list[Any] = [each.parts.get("args") for each in trainers]
    configs = [each for each in used if role_of(each) == "config"] or ([] if trainers else reading.configs)
    if len(trainers) > 1 or len(configs) > 1 or not (trainers or configs):
        found = [(each.name, each.node.node) for each in trainers] or [(each.name, each.node) for each in configs]
        named = ", ".join(f"{name} in line {node.lineno}" for name, node in found) or "none"
        known = ", ".join(f"{stem}Trainer" for stem in SCRIPTS["algorithms"])
        raise ConfigError(
            f"{path}: a script is imported if it trains once, with one of {known}; found {named}. Import its arguments "
            "as a YAML file"
        )
    config, trainer = next(iter(configs), None), next(iter(trainers), None)
    return _Collected(reading, config, trainer).script()


def class_defaults(stem: str, values: dict[str, Any]) -> str:
    """Fill in what follows from the class of a trainer, and return the algorithm.

    Args:
        stem: Name of the trainer without `Trainer`.
        values: Arguments of TRL; changed.
    """
    if stem in ("KTO", "ORPO"):
        values.setdefault("loss_type", stem.lower())
    elif stem == "CPO":
        # CPOTrainer counts its losses from its own, which it calls sigmoid
        kind = values.get("loss_type", "sigmoid")
        values["loss_type"] = {"sigmoid": "cpo", "simpo": "simpo"}.get(kind, f"{kind} of CPOTrainer")
    return str(SCRIPTS["algorithms"][stem])


class _Collected:
    """The arguments that a script gives its trainer."""

    def __init__(self, reading: ScriptReading, config: Thing | None, trainer: Thing | None) -> None:
        self._reading = reading
        self._config, self._trainer = config, trainer
        self.values: dict[str, Any] = {}
        self.computed: set[str] = set()
        # The lines of arguments are listed even if the script trains before they are collected.
        reading.is_trained = False

    def script(self) -> Script:
        """Return the script with everything that was found."""
        reading, config, trainer = self._reading, self._config, self._trainer
        made = trainer or config
        assert made is not None
        if config is not None:
            with reading.at(config.node):
                for key, value in config.parts.items():
                    self._take(key, value, Call("", config.node).line(key))
        if trainer is not None:
            with reading.at(trainer.node.node):
                for key, value in trainer.parts.items():
                    self._argument(trainer, key, value, trainer.node.line(key))
                self._validation(trainer)
        if config is not None and config.name == "TrainingArguments":
            self.values.setdefault("learning_rate", 5e-5)
        algorithm = class_defaults(stem_of(made.name), self.values)
        several = (reading.checks, reading.refused, reading.lines.values())
        checks, refused, lines = (tuple(sorted(each, key=lambda line: line.number)) for each in several)
        return Script(algorithm, self.values, frozenset(self.computed), checks, refused, lines)

    def _take(self, key: str, value: Any, line: int) -> None:
        """Take an argument of a class of arguments."""
        if key == "model_init_kwargs" and isinstance(value, dict):
            for name, each in value.items():
                if name in ("torch_dtype", "dtype", "attn_implementation") and is_constant(each):
                    if each not in (None, "auto"):
                        self.values["dtype" if name == "torch_dtype" else name] = plain(each)
                elif name == "quantization_config" and each is not None:
                    self._reading.say(Fate.REFUSED, QUANTIZED, line=line)
                elif name not in _IGNORED_LOADING and each is not None:
                    self._reading.say(Fate.CHECK, f"{name} of model_init_kwargs is not converted", line=line)
        elif is_constant(value):
            self.values[key] = plain(value)
        else:
            self._compute(key, value, f"{key}: the script computes it{{}}. Set it in the recipe", line)

    def _compute(self, key: str, value: Any, text: str, line: int) -> None:
        """List an argument that the script computes, with the lines that compute it in the place of `{}`."""
        if key:
            self.computed.add(key)
        self._reading.say(Fate.CHECK, text.format(self._reading.computed(value)), line=line)

    def _argument(self, trainer: Thing, key: str, value: Any, line: int) -> None:
        of_key = {
            "model": self._model,
            "processing_class": self._tokenizer,
            "peft_config": self._adapters,
            "ref_model": self._reference,
            "reward_funcs": self._rewards,
        }
        if key == "args":
            if value is not None and role_of(value) != "config":
                self._compute("", value, "the class of arguments is computed{}; defaults are taken", line)
        elif key in of_key:
            of_key[key](value, line)
        elif key in _DATA:
            self._dataset(key, value, line)
        elif value is None or value in ([], False):
            return
        elif key in SCRIPTS["arguments"]:
            fate, text = SCRIPTS["arguments"][key]
            self._reading.say(Fate[fate.upper()], text, line=line)
        elif table("trl").rule(key) is not None:
            self._take(key, value, line)  # an argument of trainers of earlier releases
        else:
            self._reading.say(Fate.REFUSED, f"the argument {key} of {trainer.name}", line=line)

    def _validation(self, trainer: Thing) -> None:
        """List a validation set that shares rows with the training set."""
        train, held = (trainer.parts.get(key) for key in _DATA)
        self.values.setdefault("eval_dataset", None)
        if not isinstance(train, Data) or not isinstance(held, Data):
            return
        is_split = held.is_held_out and not train.is_held_out and train.held_out is not None
        if is_split and held.settings == train.settings:
            return
        if held.is_held_out:
            self.values["eval_dataset"] = None
        if any(_share_rows(one, other) for one in train.settings for other in held.settings):
            text = "eval_dataset has rows of train_dataset. To hold rows out, set split_validation_size of data.train"
            self._reading.say(Fate.CHECK, text, line=trainer.node.line("eval_dataset"))

    def _model(self, model: Any, line: int) -> None:
        parts = model.parts if role_of(model) == "model" else {}
        name = parts.get("name") if role_of(model) == "model" else model
        if isinstance(model, str) or (role_of(model) == "model" and is_constant(name) and name):
            self.values["model_name_or_path"] = plain(name)
        else:
            text = "model: the script computes it{}. Set policy.model_name in the recipe"
            self._compute("model_name_or_path", name, text, line)
        for key in ("dtype", "attn_implementation", "gradient_checkpointing"):
            if key in parts and is_constant(parts[key]) and parts[key] != "auto":
                self.values.setdefault(key, plain(parts[key]))
        if parts.get("is_visual"):
            self.values["vision"] = True
        if "adapter" in parts:
            self.values |= {"lora_adapter": plain(parts["adapter"]), "use_peft": True}
        self._adapters(parts.get("adapters"), line)

    def _dataset(self, key: str, value: Any, line: int) -> None:
        if isinstance(value, dict) and value and all(isinstance(each, Data) for each in value.values()):
            value = Data(tuple(settings for each in value.values() for settings in each.settings))
        if isinstance(value, Data) and value.is_held_out and key == "eval_dataset":
            self.values[key] = HELD_OUT
        elif isinstance(value, Data):
            if value.is_held_out:
                self._reading.say(Fate.CHECK, f"{key} is the part that train_test_split holds out", line=line)
            held = {} if value.held_out is None else {"split_validation_size": value.held_out}
            self.values[key] = [{**settings, **held} for settings in value.settings]
        elif value is None:
            self.values[key] = None
        else:
            self._compute(key, value, f"{key}: the script computes it{{}}. Set {_DATA[key]} in the recipe", line)

    def _tokenizer(self, tokenizer: Any, line: int) -> None:
        if tokenizer is None:
            return
        if role_of(tokenizer) != "tokenizer":
            self._compute("", tokenizer, "the tokenizer is computed{}", line)
            return
        name = tokenizer.parts.get("name")
        if is_constant(name) and name != self.values.get("model_name_or_path", name):
            self.values["tokenizer_name_or_path"] = plain(name)
        if "chat_template" in tokenizer.parts:
            self.values["chat_template"] = tokenizer.parts["chat_template"]

    def _adapters(self, adapters: Any, line: int) -> None:
        if adapters is None:
            return
        kind = adapters.last_name if isinstance(adapters, Thing) else ""
        if kind.endswith("Config") and kind != "LoraConfig":
            self._reading.say(Fate.REFUSED, f"adapters other than LoRA ({kind})", line=line)
            return
        if role_of(adapters) != "adapters":
            self._compute("", adapters, "the adapters are computed{}. Set policy.lora_cfg", line)
            return
        self.values["use_peft"] = True
        if adapters.name == "LoraConfig":
            # These are peft's defaults; TRL's command line has others.
            self.values |= {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
        for key, value in adapters.parts.items():
            if is_constant(value):
                self.values[key] = plain(value)
            else:
                self._compute("", value, f"{key}: the script computes it{{}}", line)

    def _reference(self, reference: Any, line: int) -> None:
        name = reference.parts.get("name") if role_of(reference) == "model" else reference
        own = self.values.get("model_name_or_path")
        if name is None or (is_constant(name) and name == own):
            return
        if isinstance(reference, Thing) and not is_made(reference) and not reference.touches:
            self._reading.say(Fate.CHECK, "ref_model is computed; the reference is the initial policy", line=line)
            return
        self._reading.say(Fate.REFUSED, "a reference model other than the initial policy (ref_model)", line=line)

    def _rewards(self, rewards: Any, line: int) -> None:
        several = rewards if isinstance(rewards, list | tuple) else [rewards]
        named = []
        for each in several:
            if role_of(each) == "partial":
                bound = each.parts["call"]
                given = ", ".join(map(str, (*bound.positional, *bound.given)))
                self._reading.say(
                    Fate.CHECK, f"{each.name} gets the arguments {given}. Write them into the function", line=line
                )
                each = each.parts["function"]
            if isinstance(each, str):
                named.append(each)
            elif isinstance(each, Thing) and isinstance(each.node, ast.FunctionDef | ast.ClassDef):
                where = f"(line {each.node.lineno}) into a file such as rewards.py, without what trains"
                self._reading.say(Fate.CHECK, f"copy {each.name} {where}", line=line)
                named.append(f"rewards.py:{each.name}")
            elif role_of(each) == "import" and "." in each.name:
                module, _, function = each.name.rpartition(".")
                path = f"{module.replace('.', '/')}.py"
                is_here = (self._reading.folder / path).is_file()
                named.append(f"{path if is_here else module}:{function}")
            else:
                name = each.name if role_of(each) == "import" else "FUNCTION"
                self._compute("", each, f"the reward {name} is computed{{}}. Write it as a function in a file", line)
                named.append(f"FILE.py:{name}")
        self.values["reward_funcs"] = named


def _share_rows(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two datasets have rows in common; two different slices of a split may have none."""
    if any(one.get(key) != other.get(key) for key in ("dataset_name", "data_path", "subset")):
        return False
    [(first, cut), (second, other_cut)] = [str(each.get("split")).partition("[")[::2] for each in (one, other)]
    return first == second and (not cut or not other_cut or cut == other_cut)
