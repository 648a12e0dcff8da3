"""Registries, suggestions for mistyped names, and plug-ins."""

import sys

import pytest

from featureflock.utils.registry import PLUGINS, Registry, import_submodules, load_plugins, unknown_name


class Shape:
    pass


def shapes() -> Registry[type]:
    registry: Registry[type] = Registry("shape")

    @registry.register("square")
    class Square(Shape):
        pass

    registry.add("circle", type("Circle", (Shape,), {}))
    return registry


def test_components_are_found_by_name_in_order():
    registry = shapes()
    assert list(registry) == ["square", "circle"]
    assert len(registry) == 2
    assert registry["square"].__name__ == "Square"
    assert "circle" in registry
    assert "cone" not in registry
    assert registry.get("cone") is None
    assert registry.get("circle") is registry["circle"]


def test_names_of_components_and_of_their_instances():
    registry = shapes()
    assert registry.name_of(registry["circle"]) == "circle"
    assert registry.name_of(registry["circle"]()) == "circle"
    assert registry.name_of(Shape()) is None


def test_a_name_can_be_used_once():
    registry = shapes()
    registry.add("circle", registry["circle"])  # the same again: a module may be imported twice
    with pytest.raises(ValueError, match="already a shape called 'circle'; choose another name"):
        registry.add("circle", Shape)
    assert registry["circle"] is not Shape
    with pytest.raises(ValueError, match="already a shape of class Circle; rename the class"):
        registry.add("ellipse", type("Circle", (Shape,), {}))
    assert "ellipse" not in registry


def test_a_mistyped_name_gets_a_suggestion():
    with pytest.raises(ValueError, match=r"There is no shape 'sqare'; did you mean square\?"):
        shapes()["sqare"]
    with pytest.raises(ValueError, match=r"There is no shape 'x'; choose from square, circle\."):
        shapes()["x"]
    assert str(unknown_name("study", "x", ["a"], otherwise="See --list.")) == "There is no study 'x'; See --list."


def test_plugins_are_imported(tmp_path, monkeypatch):
    (tmp_path / "flock_plugin_one.py").write_text("LOADED = True")
    (tmp_path / "flock_plugin_two.py").write_text("LOADED = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(PLUGINS, "flock_plugin_one, flock_plugin_two,")
    load_plugins()
    import flock_plugin_one
    import flock_plugin_two

    assert flock_plugin_one.LOADED
    assert flock_plugin_two.LOADED
    monkeypatch.setenv(PLUGINS, "flock_plugin_three")
    with pytest.raises(ValueError, match=f"plug-in flock_plugin_three named in {PLUGINS} cannot be imported"):
        load_plugins()
    monkeypatch.delenv(PLUGINS)
    load_plugins()


def test_plugins_are_found_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "flock_plugin_here.py").write_text("LOADED = True")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(PLUGINS, raising=False)
    load_plugins()
    assert str(tmp_path) not in sys.path
    monkeypatch.setenv(PLUGINS, "flock_plugin_here")
    load_plugins()
    assert sys.modules["flock_plugin_here"].LOADED
    assert sys.path[-1] == str(tmp_path)  # last, so that it hides no installed module


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("x = (", r"SyntaxError: '\(' was never closed"),
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("import flock_missing", "No module named 'flock_missing'"),
        ("raise ValueError('There is already a prior')", "There is already a prior"),
    ],
)
def test_a_broken_plugin_is_named(tmp_path, monkeypatch, code, reason):
    (tmp_path / "flock_plugin_broken.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(PLUGINS, "flock_plugin_broken")
    with pytest.raises(ValueError, match=f"flock_plugin_broken named in {PLUGINS} cannot be imported: {reason}"):
        load_plugins()


def test_every_public_submodule_is_imported(tmp_path, monkeypatch):
    package = tmp_path / "flock_package"
    package.mkdir()
    (package / "__init__.py").write_text("loaded = []")
    for name in ("one", "two", "_private"):
        (package / f"{name}.py").write_text(f"from flock_package import loaded\nloaded.append({name!r})")
    monkeypatch.syspath_prepend(tmp_path)
    import flock_package

    import_submodules("flock_package", list(flock_package.__path__))
    assert flock_package.loaded == ["one", "two"]
