"""Write the tables in docs/ from the JSON files in this folder.

    python results/write_tables.py            rewrite every table
    python results/write_tables.py --check    list the tables that differ from the files, and fail if there are any

A page marks the place of a table by two comments, and the text between them is generated:

    <!-- demo: from results/demo_study.json -->
    <!-- end -->

To publish a new result, put its JSON file here, add the two comments to a page and a line to TABLES.
"""

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "results"), str(ROOT / "benchmarks")]

import render  # noqa: E402
import render_benchmarks  # noqa: E402
import render_repulsion  # noqa: E402

Render = Callable[[Any], str]


class ResultTable(NamedTuple):
    """One generated table."""

    page: str
    marker: str
    results: str
    """File name in results/."""
    render: Render

    @property
    def pattern(self) -> re.Pattern[str]:
        start = re.escape(f"<!-- {self.marker}: from results/{self.results} -->\n")
        return re.compile(f"({start})(.*?)(<!-- end -->)", flags=re.S)

    def text(self) -> str:
        return self.render(json.loads((ROOT / "results" / self.results).read_text())).strip() + "\n"


def benchmark(module: str, key: str = "rows") -> Render:
    """The table that a script in benchmarks/ prints, from one entry of its JSON file."""

    def table(content: dict[str, Any]) -> str:
        rows = [{render.KEYS.get(name, name): value for name, value in row.items()} for row in content[key]]
        return render.current_words(importlib.import_module(module).table(rows))

    return table


def step_prediction(content: dict[str, Any]) -> str:
    """Predicted and measured steps, and how many predictions are within the limit."""
    met = sum(row["met"] for row in content["rows"])
    within = f"{met} of {len(content['rows'])} predictions are within {100 * content['limit']:.0f} %"
    machine = (
        f"{content['cores']} cores of an {content['machine']['processor']}, load {content['load_before']:.1f} before"
    )
    return f"{benchmark('step_prediction')(content)}\n\n{within}. {machine}."


TABLES = (
    ResultTable("docs/results/demo.md", "demo", "demo_study.json", render.study),
    ResultTable("docs/results/demo.md", "tuning-two-views", "tuning_two_view_digits.json", render.tuning),
    ResultTable(
        "docs/notes/study_protocol.md", "tuning-cifar10-repulsion", "tuning_cifar10_repulsion.json", render.tuning
    ),
    ResultTable("docs/security.md", "fuzz", "fuzz.json", render.fuzz),
    ResultTable("docs/results.md", "headline", "repulsion_headline.json", render_repulsion.headline),
    ResultTable("docs/results.md", "claims", "claims.json", render_repulsion.claims),
    ResultTable("docs/results.md", "repulsion-fashion-mlp", "repulsion_fashion_mnist_mlp.json", render.study),
    ResultTable("docs/results.md", "repulsion-cifar10", "repulsion_cifar10.json", render.study),
    ResultTable("docs/results.md", "repulsion-fashion-cnn", "repulsion_fashion_mnist_cnn.json", render.study),
    ResultTable("docs/results.md", "repulsion-cifar100", "repulsion_cifar100.json", render.study),
    ResultTable(
        "docs/notes/study_protocol.md",
        "repulsion-strength",
        "repulsion_strength.json",
        render_repulsion.repulsion_curve,
    ),
    ResultTable(
        "docs/notes/study_protocol.md", "replication-cifar10", "repulsion_cifar10_from_seed_5.json", render.study
    ),
    ResultTable(
        "docs/notes/study_protocol.md", "gains-by-width", "repulsion_strength.json", render_repulsion.gains_by_width
    ),
    ResultTable("docs/notes/study_protocol.md", "repulsion-size", "repulsion_size.json", render.study),
    ResultTable("docs/notes/study_protocol.md", "ece-floor", "ece_floor_fashion_mlp.json", render_repulsion.ece_floor),
    ResultTable("docs/notes/study_protocol.md", "forces", "forces_cifar10.json", render_repulsion.forces),
    ResultTable(
        "docs/notes/study_protocol.md", "member-errors", "member_errors_cifar10.json", render_repulsion.member_errors
    ),
    ResultTable("docs/notes/study_protocol.md", "tuning-cifar100", "tuning_cifar100.json", render.tuning),
    ResultTable("docs/notes/study_protocol.md", "tuning-fashion-mlp", "tuning_fashion_mlp.json", render.tuning),
    ResultTable("docs/notes/study_protocol.md", "tuning-fashion-cnn", "tuning_fashion_cnn.json", render.tuning),
    ResultTable("docs/notes/laptop_study.md", "cifar10-small", "cifar10_small.json", render.training_runs),
    ResultTable("docs/results/regression.md", "regression", "regression.json", benchmark("regression")),
    ResultTable(
        "docs/notes/laptop_study.md", "cifar10-small-evaluation", "cifar10_small_evaluation.json", render.evaluation
    ),
    ResultTable("docs/notes/decisions.md", "engine", "benchmark_engine.json", benchmark("compute_options")),
    ResultTable("docs/notes/decisions.md", "corruptions", "benchmark_corruptions.json", benchmark("corruptions")),
    ResultTable("docs/notes/decisions.md", "tabular", "benchmark_tabular.json", benchmark("tabular")),
    ResultTable("docs/guides/coming_from.md", "peers", "peers.json", benchmark("peers")),
    ResultTable("docs/guides/coming_from.md", "peer-speed", "peer_speed.json", render_benchmarks.peer_speed),
    ResultTable("docs/results/methods.md", "methods", "benchmark_methods.json", benchmark("methods")),
    ResultTable("docs/results/methods.md", "two-view-digits", "two_view_digits_eight.json", render.evaluation),
    ResultTable("docs/results/methods.md", "cifar10-eight", "cifar10_eight.json", render.evaluation),
    ResultTable("docs/results/methods.md", "redundancy", "cifar10_eight_redundancy.json", benchmark("redundancy")),
    ResultTable("docs/notes/two_views.md", "two-views", "two_views.json", render.views),
    ResultTable("docs/notes/two_views.md", "dominoes", "dominoes.json", render.views),
    ResultTable("docs/notes/two_views.md", "dominoes-search", "dominoes_search.json", benchmark("dominoes_search")),
    ResultTable("docs/notes/laptop_study.md", "tuning", "tuning_cifar10_laptop.json", render.study),
    ResultTable("docs/notes/laptop_study.md", "tuning-ranks", "tuning_cifar10_laptop_ranks.json", render.study),
    ResultTable("docs/notes/laptop_study.md", "laptop-search", "laptop_search.json", render.searches),
    ResultTable("docs/results/reproductions.md", "laptop-cifar10", "laptop_cifar10.json", render.study),
    ResultTable("docs/notes/laptop_study.md", "text-or-code", "laptop_text_or_code.json", render.study),
    ResultTable("docs/results/reproductions.md", "ensemble-size", "laptop_ensemble_size.json", render.study),
    ResultTable("docs/results/reproductions.md", "width", "laptop_width.json", render.study),
    ResultTable("docs/results/reproductions.md", "priors", "laptop_priors.json", render.study),
    ResultTable("docs/results/reproductions.md", "rank", "laptop_rank.json", render.study),
    ResultTable("docs/results/reproductions.md", "cam-similarity", "laptop_cam_similarity.json", render.study),
    ResultTable("docs/results/reproductions.md", "severity", "laptop_severity.json", render.study),
    ResultTable("docs/notes/laptop_study.md", "longer", "laptop_longer.json", render.study),
    ResultTable("docs/notes/speed.md", "flops-to-accuracy", "to_accuracy.json", benchmark("flops_to_accuracy")),
    ResultTable("docs/results/speed.md", "speed", "bench.json", render_benchmarks.speed),
    ResultTable("docs/results/speed.md", "precision", "precision.json", render.precision),
    ResultTable("docs/notes/speed.md", "bench", "bench.json", benchmark("harness")),
    ResultTable("docs/notes/speed.md", "profile", "bench_profile.json", benchmark("profile_step")),
    ResultTable("docs/results/sharing.md", "sharing-cost", "benchmark_sharing.json", benchmark("harness")),
    ResultTable("docs/results/sharing.md", "sharing", "sharing.json", benchmark("sharing_quality")),
    *(
        ResultTable(
            "docs/results/scaling.md", f"communication-{key}", "benchmark_communication.json", benchmark(module, key)
        )
        for key, module in (("counted", "communication"), ("configurations", "communication"), ("times", "harness"))
    ),
    ResultTable("docs/results/scaling.md", "step-prediction", "step_prediction.json", step_prediction),
    ResultTable(
        "docs/results/scaling.md", "projected", "step_prediction.json", benchmark("communication", "projected")
    ),
)


def updated_pages() -> dict[str, str]:
    """Every page with tables, its tables written anew."""
    pages = {page: (ROOT / page).read_text() for page in dict.fromkeys(table.page for table in TABLES)}
    for table in TABLES:
        text, count = table.pattern.subn(lambda match, new=table.text(): match[1] + new + match[3], pages[table.page])
        if count != 1:
            raise SystemExit(f"{table.page} must have one place for the table {table.marker}; it has {count}.")
        pages[table.page] = text
    return pages


def outdated() -> list[str]:
    """Markers of tables that differ from the files in results/."""
    pages = {table.page: (ROOT / table.page).read_text() for table in TABLES}
    shown = {table: [part for _, part, _ in table.pattern.findall(pages[table.page])] for table in TABLES}
    return [table.marker for table in TABLES if shown[table] != [table.text()]]


def unregistered() -> list[str]:
    """Markers in the pages that have no line in TABLES."""
    known = {table.marker for table in TABLES}
    text = "\n".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    return [marker for marker in re.findall(r"<!-- ([\w-]+): from results/", text) if marker not in known]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table differs from its file")
    if parser.parse_args().check:
        if wrong := [*outdated(), *unregistered()]:
            sys.exit(f"Out of date: {', '.join(wrong)}. Run python results/write_tables.py.")
        return
    for page, text in updated_pages().items():
        if text != (ROOT / page).read_text():
            (ROOT / page).write_text(text)
            print(f"wrote {page}")


if __name__ == "__main__":
    main()
