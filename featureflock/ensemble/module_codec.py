"""Encode a tree of modules as JSON and decode it without executing code that the JSON names.

A module is encoded as the name of its class, its plain attributes, its tensors and its submodules. The decoder calls no
constructor. It finds a class by name among those of this library and those that the program has already imported, and
priors, kernels, rules and tasks in their registries. Values that JSON cannot represent (a lambda, a configuration
object, a hook) raise NotSerializableError.
"""

import dataclasses
import importlib
import inspect
import math
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from featureflock.core import KERNELS, PRIORS, RULES
from featureflock.ensemble.execution import own_attributes
from featureflock.tasks import TASKS
from featureflock.utils.registry import PLUGINS, Registry

_REGISTRIES: dict[str, Registry[Any]] = {registry.kind: registry for registry in (PRIORS, KERNELS, RULES, TASKS)}
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "Size": torch.Size}
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_FUNCTIONS = {f"F.{k}": f for k, f in vars(nn.functional).items() if inspect.isroutine(f) and not k.startswith("_")}
_ACTIVATIONS = ("relu", "tanh", "sigmoid", "selu", "celu", "softmax", "sin", "cos", "exp", "erf")
_FUNCTIONS |= {k: getattr(torch, k) for k in _ACTIVATIONS}
_IMPORT = f"import it first (commands import the modules named in {PLUGINS})"
USE_INTO = "build the ensemble with your code and call load(folder, into=ensemble)"


class ObjectCodec(NamedTuple):
    """JSON form of the attributes of one kind that the modules of another library have."""

    matches: Callable[[Any], bool]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


OBJECTS: dict[str, ObjectCodec] = {}
"""Such kinds of attributes, by the name of the module of featureflock that adds them when it is imported."""
LIBRARIES = {"featureflock"}
"""Packages whose modules the decoder may import."""


class NotSerializableError(Exception):
    """A module cannot be encoded as JSON. The message is a clause to follow "because"."""


class UnknownClassError(ValueError):
    """The class of a module, or a registered component, is unknown to this program."""


class ModuleEncoder:
    """Encodes modules as JSON and collects their tensors by name; shared modules and tensors are written once.

    The buffer `without` is left out.
    """

    def __init__(self, without: Tensor | None = None) -> None:
        self._without = without
        self.tensors: dict[str, Tensor] = {}
        self._keys: dict[int, str] = {}
        self._paths: dict[int, str] = {}
        self.classes: set[type[nn.Module]] = set()
        """Classes of the modules encoded so far."""

    def module(self, module: nn.Module, path: str = "") -> dict[str, Any]:
        where = path or "the ensemble"
        if id(module) in self._paths:
            return {"same": self._paths[id(module)]}
        self._paths[id(module)] = path
        cls = type(module)
        if not _can_be_found(cls):
            raise NotSerializableError(f"the class {cls.__qualname__} of {where} cannot be found by its name")
        self.classes.add(cls)
        if any(value for name, value in vars(module).items() if name.endswith("_hooks")):
            raise NotSerializableError(f"{where} has hooks")
        dot = f"{path}." if path else ""
        return {
            "path": path,
            "class": class_name(cls),
            "attributes": {k: self._value(v, dot + k) for k, v in own_attributes(module).items()},
            "parameters": {k: self.tensor(t, dot + k) for k, t in module._parameters.items()},
            "buffers": {k: self.tensor(t, dot + k) for k, t in module._buffers.items() if t is not self._without},
            "transient": sorted(module._non_persistent_buffers_set),
            "children": {k: None if m is None else self.module(m, dot + k) for k, m in module._modules.items()},
        }

    def tensor(self, tensor: Tensor | None, name: str) -> str | None:
        """Return the key of a tensor in `tensors`."""
        if tensor is None:
            return None
        if id(tensor) not in self._keys:
            self._keys[id(tensor)] = name
            self.tensors[name] = tensor
        return self._keys[id(tensor)]

    def _value(self, value: Any, path: str) -> Any:
        """Encode an attribute: as itself if JSON has its type, otherwise as a list of a tag and arguments."""
        kind = type(value)
        if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
            return value
        if kind is float:
            return ["float", str(value)]
        if kind in _SEQUENCES.values():
            return [kind.__name__, [self._value(v, f"{path}[{i}]") for i, v in enumerate(value)]]
        if kind is dict and all(type(k) is str for k in value):
            return {k: self._value(v, f"{path}[{k!r}]") for k, v in value.items()}
        if kind is torch.dtype:
            return ["dtype", str(value)]
        if isinstance(value, Tensor):
            return ["parameter" if isinstance(value, nn.Parameter) else "tensor", self.tensor(value, path)]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for registry in _REGISTRIES.values():
                if (name := registry.name_of(value)) is not None:
                    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
                    return [registry.kind, name, self._value(fields, path)]
        if isinstance(value, type) and issubclass(value, nn.Module) and _can_be_found(value):
            return ["class", class_name(value)]
        for name, function in _FUNCTIONS.items():
            if function is value:
                return ["function", name]
        for name, codec in OBJECTS.items():
            if codec.matches(value):
                return ["object", name, codec.encode(value)]
        raise NotSerializableError(f"{path} is a {kind.__name__}, which JSON cannot represent")


class ModuleDecoder:
    """Decodes the JSON of `ModuleEncoder`. Any exception but UnknownClassError means that the JSON was modified."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._parameters: dict[str, nn.Parameter] = {}
        self._modules: dict[str, nn.Module] = {}
        self._classes = _known_classes()

    def module(self, text: dict[str, Any]) -> nn.Module:
        if "same" in text:
            return self._modules[text["same"]]
        cls = self._class(text["class"])
        module: nn.Module = cls.__new__(cls)
        nn.Module.__init__(module)
        self._modules[text["path"]] = module
        for name, value in text["attributes"].items():
            if name in vars(module) and name != "training":
                raise KeyError(name)  # PyTorch's dictionaries of tensors, submodules and hooks
            vars(module)[name] = self._value(value)
        for name, key in text["parameters"].items():
            module.register_parameter(name, None if key is None else self._parameter(key))
        for name, key in text["buffers"].items():
            buffer = None if key is None else self._tensors[key]
            module.register_buffer(name, buffer, persistent=name not in text["transient"])
        for name, child in text["children"].items():
            module.add_module(name, None if child is None else self.module(child))
        if isinstance(module, nn.RNNBase):
            module.cpu()  # updates the RNN's list of its weights
        return module

    def _value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: self._value(v) for k, v in value.items()}
        if not isinstance(value, list):
            return value
        tag, content, *fields = value
        if tag in _SEQUENCES:
            return _SEQUENCES[tag]([self._value(v) for v in content])
        if tag in _REGISTRIES:
            if content not in _REGISTRIES[tag]:
                which = f"a {tag} {content!r}, which is not registered"
                raise UnknownClassError(f"The ensemble has {which}; {_IMPORT}, or {USE_INTO}.")
            return _REGISTRIES[tag][content](**self._value(fields[0]))
        if tag == "object":
            if content not in OBJECTS and content.startswith("featureflock."):
                try:
                    importlib.import_module(content)
                except ImportError as error:
                    raise UnknownClassError(f"The ensemble has modules of another library. {error}") from error
            return OBJECTS[content].decode(fields[0])
        decoders: dict[str, Callable[[str], Any]] = {
            "float": float,
            "dtype": _DTYPES.__getitem__,
            "tensor": self._tensors.__getitem__,
            "parameter": self._parameter,
            "class": self._class,
            "function": _FUNCTIONS.__getitem__,
        }
        return decoders[tag](content)

    def _parameter(self, key: str) -> nn.Parameter:
        if key not in self._parameters:
            tensor = self._tensors[key]
            self._parameters[key] = nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
        return self._parameters[key]

    def _class(self, name: str) -> type[nn.Module]:
        if name.partition(".")[0] in LIBRARIES and name not in self._classes:
            with suppress(ImportError, ValueError):
                importlib.import_module(name.rpartition(".")[0])
            self._classes = _known_classes()
        if name not in self._classes:
            which = f"modules of class {name}, which this program has not imported"
            raise UnknownClassError(f"The ensemble has {which}; {_IMPORT}, or {USE_INTO}.")
        return self._classes[name]


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _can_be_found(cls: type[nn.Module]) -> bool:
    return _known_classes().get(class_name(cls)) is cls


def _known_classes() -> dict[str, type[nn.Module]]:
    """Return every module class that the program has imported, by name; of PyTorch's, only the layers of torch.nn."""

    def below(cls: type[nn.Module]) -> list[type[nn.Module]]:
        return [subclass for sub in cls.__subclasses__() for subclass in (sub, *below(sub))]

    private = re.compile(r"torch\.(?!nn\.modules\.)")
    return {class_name(cls): cls for cls in below(nn.Module) if not private.match(cls.__module__)}
