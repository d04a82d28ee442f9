"""Small corpora for the tests."""

import json
import random
from pathlib import Path


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


def some_texts(count: int, seed: int = 0) -> list[str]:
    """Documents of 1 to 40 words, each different."""
    chance = random.Random(seed)
    words = ["depth", "weights", "mix", "what", "each", "layer", "wrote", "into", "the", "stream", "é", "世界"]
    return [f"{number}: " + " ".join(chance.choices(words, k=chance.randint(1, 40))) for number in range(count)]
