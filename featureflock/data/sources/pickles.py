"""Read dictionaries of NumPy arrays, lists and texts from pickles, as in CIFAR, without unpickling.

`pickle.load` runs code that the file names, and takes as much memory as the file demands. Here `pickletools` takes the
file apart, and the few instructions that such dictionaries need are carried out on plain values. A function or class
that the file names becomes a `_Call`, which stores its arguments. So no code runs on the content of the file, and the
result is not much larger than the file.
"""

import pickletools
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NAMES = {"numpy.ndarray", "numpy.dtype", "numpy.core.multiarray._reconstruct", "numpy.core.numeric._frombuffer"}
_NAMES |= {"_codecs.encode"}
_INTEGERS = ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8")
_MAX_INSTRUCTIONS = 1_000_000  # CIFAR needs fewer than 10 for each image

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {f"{size}{kind}" for kind in ("BINBYTES", "BINUNICODE", "BINSTRING") for size in ("", "SHORT_")}
_VALUES |= {"BINBYTES8", "BINUNICODE8", "BYTEARRAY8", "STRING", "UNICODE"}
_VALUES |= {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"}


class RefusedName(ValueError):
    """A pickle names a function or class that arrays do not need."""


class _Call:
    """Call of a function or class that a pickle names, and the state that was set afterwards."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args, self.state = args, ()


def read_dictionary(data: bytes) -> dict[str, Any]:
    """Return the dictionary in a pickle. RefusedName, or another exception if it is damaged or has other content."""
    loaded = _Machine().run(data)
    if type(loaded) is not dict:
        raise ValueError("no dictionary")
    return {_text(key): _array(value) if isinstance(value, _Call) else value for key, value in loaded.items()}


class _Machine:
    """Stack, marks on the stack and memo of a pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count > _MAX_INSTRUCTIONS:
                raise ValueError("too many instructions")
            if opcode.name == "STOP":
                break
            if opcode.name in _VALUES:
                self.stack.append(argument)
            elif opcode.name in _CONSTANTS:
                self.stack.append(_CONSTANTS[opcode.name])
            else:
                self.do(opcode.name, argument)
        return self.stack.pop()

    def do(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self.marks.append(len(stack))
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self.pop(int(name[-1]) if name[-1].isdigit() else 0)))
            case "TUPLE":
                stack.append(tuple(self.pop_to_mark()))
            case "LIST":
                stack.append(self.pop_to_mark())
            case "DICT":
                items = self.pop_to_mark()
                stack.append({})
                self.set_items(items)
            case "APPEND" | "APPENDS":
                items = self.pop(1) if name == "APPEND" else self.pop_to_mark()
                list.extend(stack[-1], items)
            case "SETITEM" | "SETITEMS":
                self.set_items(self.pop(2) if name == "SETITEM" else self.pop_to_mark())
            case "GLOBAL" | "STACK_GLOBAL":
                module, _, attribute = argument.partition(" ") if name == "GLOBAL" else (stack[-2], "", stack[-1])
                if name == "STACK_GLOBAL":
                    self.pop(2)
                full_name = f"{_text(module)}.{_text(attribute)}"
                if full_name.replace("._core.", ".core.") not in _NAMES:
                    raise RefusedName(full_name)
                stack.append(_Call)
            case "REDUCE":
                called, arguments = self.pop(2)
                if called is not _Call or type(arguments) is not tuple:
                    raise ValueError("no call")
                stack.append(_Call(arguments))
            case "BUILD":
                (state,) = self.pop(1)
                if type(stack[-1]) is not _Call or type(state) is not tuple:
                    raise ValueError("no array")
                stack[-1].state = state
            case _:
                raise ValueError(f"{name} is not needed for arrays")

    def pop(self, count: int) -> list[Any]:
        first = len(self.stack) - count
        if first < (self.marks[-1] if self.marks else 0):
            raise ValueError("stack underflow")
        items = self.stack[first:]
        del self.stack[first:]
        return items

    def pop_to_mark(self) -> list[Any]:
        return self.pop(len(self.stack) - self.marks.pop())

    def set_items(self, items: list[Any]) -> None:
        keys = items[::2]
        if not all(type(key) in (str, bytes) for key in keys):
            raise ValueError("keys must be texts")
        dict.update(self.stack[-1], zip(keys, items[1::2], strict=True))


def _array(call: _Call) -> NDArray[Any]:
    """Build an array of integers from a stored call of numpy's _reconstruct or, in protocol 5, _frombuffer."""
    if call.state:
        _, shape, dtype, column_major, data = call.state
    else:
        data, dtype, shape, order = call.args
        column_major = _text(order) == "F"
    code, byte_order = _text(dtype.args[0]), _text(dtype.state[1])
    if code not in _INTEGERS or byte_order not in "<>|":
        raise ValueError(f"no array of {code}")
    if isinstance(data, _Call):  # protocol 2 of Python 3 writes bytes as _codecs.encode(text, "latin1")
        data = data.args[0]
    if isinstance(data, str):  # as Python 2 wrote bytes
        data = data.encode("latin1")
    return np.frombuffer(data, byte_order + code).reshape(shape, order="F" if column_major else "C")


def _text(value: Any) -> str:
    if type(value) not in (str, bytes):
        raise ValueError("no text")
    return value.decode() if isinstance(value, bytes) else str(value)
