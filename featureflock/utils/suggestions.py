"""What to say to someone who has mistyped a name."""

import difflib
from collections.abc import Collection


def unknown_name(what: str, name: str, choices: Collection[str], otherwise: str = "") -> ValueError:
    """An error that suggests the closest of the names that there are, or lists them, or says `otherwise`."""
    close = difflib.get_close_matches(name, choices, n=1)
    hint = f"did you mean {close[0]}?" if close else otherwise or f"there are {', '.join(choices)}."
    return ValueError(f"There is no {what} {name!r}; {hint}")
