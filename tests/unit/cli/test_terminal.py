"""Progress bars of the commands."""

import io

from rich.console import Console

from featureflock.cli.terminal import progress_bar


def test_two_progress_bars_side_by_side_in_a_terminal():
    """Studies show one for runs and one for examples; each appears with its first item."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with progress_bar(console, "runs") as runs, progress_bar(console, "examples") as examples:
        runs(0, 25, "training")
        runs(3, 25, "feature-WGD, seed 0")
        examples(1_500, 2_000, "clean")
    shown = console.file.getvalue()
    assert "training" in shown
    assert "3/25 runs" in shown
    assert "1,500/2,000 examples" in shown


def test_elsewhere_one_line_for_each_description():
    console = Console(file=io.StringIO(), width=100)
    with progress_bar(console, "runs") as runs:
        for done, what in enumerate(("training", "Single, seed 0", "Single, seed 0")):
            runs(done, 25, what)
    assert console.file.getvalue().splitlines() == [
        "training (0 of 25 runs done)",
        "Single, seed 0 (1 of 25 runs done)",
    ]
