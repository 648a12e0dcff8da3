"""Error messages for mistyped names."""

import difflib
from collections.abc import Collection


def unknown_name(what: str, name: str, choices: Collection[str], otherwise: str = "") -> ValueError:
    """Return an error that suggests the closest choice; if none is close, `otherwise`, or a list of all choices."""
    close = difflib.get_close_matches(name, choices, n=1)
    hint = f"did you mean {close[0]}?" if close else otherwise or f"choose from {', '.join(choices)}."
    return ValueError(f"There is no {what} {name!r}; {hint}")
