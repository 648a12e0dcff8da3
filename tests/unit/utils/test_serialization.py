"""Dataclasses to JSON and back: round trips, and errors that name the place."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featureflock.utils.serialization import from_json, to_json


class Interval(NamedTuple):
    low: float
    high: float


class Animal:
    pass


@runtime_checkable
class Speaks(Protocol):
    def speak(self) -> str: ...


@dataclass(frozen=True)
class Dog(Animal):
    name: str = "Rex"

    def speak(self) -> str:
        return "woof"


@dataclass(frozen=True)
class Cat(Animal):
    lives: int = 9


@dataclass(frozen=True)
class Zoo:
    star: Animal
    animals: tuple[Animal, ...] = ()
    size: Literal["small", "large"] | float = "small"
    open: bool = True
    ages: dict[str, int] = field(default_factory=dict)
    by_year: dict[int, list[float]] = field(default_factory=dict)
    range: Interval | None = None
    folder: Path = Path("zoo")
    pair: tuple[int, str] = (1, "a")
    notes: Any = None
    speaker: Speaks | None = None
    names: Sequence[str] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


CLASSES = {cls.__name__: cls for cls in (Dog, Cat, Zoo)}


def find(name: str) -> type:
    if name not in CLASSES:
        raise ValueError(f"no class {name}")
    return CLASSES[name]


def round_trip(value: Any, hint: Any = Zoo) -> Any:
    return from_json(hint, json.loads(json.dumps(to_json(value))), find)


ANIMALS = st.one_of(st.builds(Dog, st.text()), st.builds(Cat, st.integers()))
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=25)
@given(
    st.builds(
        Zoo,
        star=ANIMALS,
        animals=st.lists(ANIMALS).map(tuple),
        size=st.sampled_from(["small", "large", 2.5]),
        open=st.booleans(),
        ages=st.dictionaries(st.text(), st.integers()),
        by_year=st.dictionaries(st.integers(), st.lists(FLOATS)),
        range=st.none() | st.builds(Interval, FLOATS, FLOATS),
        folder=st.just(Path("a/b")),
        pair=st.tuples(st.integers(), st.text()),
        notes=st.none() | st.lists(st.integers()),
        speaker=st.none() | st.just(Dog("Fido")),
        names=st.lists(st.text()),
        extra=st.dictionaries(st.text(), st.integers()),
    )
)
def test_round_trip(zoo):
    assert round_trip(zoo) == zoo


def test_the_form_of_the_json():
    assert to_json(Zoo(Cat(3), range=Interval(1.0, 2.0)))["star"] == {"class": "Cat", "lives": 3}
    assert to_json(Cat(3), tag=False) == {"lives": 3}
    assert to_json(Interval(1.0, 2.0)) == {"low": 1.0, "high": 2.0}


def test_missing_fields_have_their_defaults():
    assert from_json(Zoo, {"star": {"class": "Dog"}}, find) == Zoo(Dog())


def test_an_integer_is_a_float_and_a_bool_is_not():
    value = from_json(Interval, {"low": 1, "high": 2})
    assert value == Interval(1.0, 2.0)
    assert type(value.low) is float
    with pytest.raises(ValueError, match=r"the JSON\.low must be float; got True"):
        from_json(Interval, {"low": True, "high": 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"open": 1}, "zoo.open must be bool; got 1"),
        ({"ages": {"a": "b"}}, "zoo.ages.a must be int; got 'b'"),
        ({"animals": {}}, r"zoo.animals must be tuple\[.*Animal, ...\]; got {}"),
        ({"animals": [{"class": "Cat", "lives": "9"}]}, r"zoo.animals\[0\].lives must be int; got '9'"),
        ({"animals": [{"class": "Cat", "tail": 1}]}, r"animals\[0\] has an unknown field 'tail'; Cat has lives"),
        ({"pair": [1]}, r"zoo.pair must be tuple\[int, str\]; got \[1\]"),
        ({"size": "huge"}, r"zoo.size must be Literal\['small', 'large'\] \| float; got 'huge'|zoo.size must be Union"),
        ({"range": {"low": 1}}, "zoo.range has no 'high'"),
        ({"range": [1, 2]}, "zoo.range must be Interval"),
        ({"star": {"class": "Fish"}}, "no class Fish"),
        ({"star": {"class": "Zoo", "star": {"class": "Dog"}}}, "zoo.star must be Animal; got Zoo"),
        ({"star": {}}, "zoo.star must name its class; Animal cannot be built"),
        ({"speaker": {"class": "Cat"}}, "zoo.speaker must be Speaks; got Cat"),
        ({"folder": 3}, "zoo.folder must be Path; got 3"),
        ({"colour": "red"}, "zoo has an unknown field 'colour'; Zoo has star, animals"),
    ],
)
def test_errors_name_the_place(change, message):
    value = {**to_json(Zoo(Dog())), **change}
    with pytest.raises(ValueError, match=message):
        from_json(Zoo, value, find, "zoo")


def test_without_find_class_the_class_must_be_that_of_the_hint():
    assert from_json(Dog, {"class": "Dog", "name": "a"}) == Dog("a")
    assert from_json(Dog | Cat, {"class": "Cat", "lives": 1}) == Cat(1)
    with pytest.raises(ValueError, match="the JSON must be Dog; got Cat"):
        from_json(Dog, {"class": "Cat", "name": "a"})


def test_checks_of_a_class_are_raised():
    @dataclass(frozen=True)
    class Positive:
        value: float

        def __post_init__(self) -> None:
            if self.value <= 0:
                raise ValueError("value must be positive")

    with pytest.raises(ValueError, match="value must be positive"):
        from_json(Positive, {"value": -1.0})


def test_values_without_a_json_type_need_a_fallback():
    with pytest.raises(TypeError, match="A complex cannot be converted to JSON"):
        to_json({"a": 1j})
    assert to_json({"a": [1j]}, fallback=str) == {"a": ["1j"]}
