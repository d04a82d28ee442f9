"""Chance level: whether the model predicts better than a uniform guess, or one that knows token frequencies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.metric import Explained, Finding, Metric, Model, Sentence
from residua.diagnose.sentences import CLEAR, sureness

NEAR = 0.05
"""If a loss is this close to chance level, in nats, we advise to measure again with more text."""


class ChanceKeys(Frozen):
    """Nats per token of the text if all tokens were equally probable, and if each had its frequency as probability;
    None in older files."""

    uniform_loss: float | None = None
    frequency_loss: float | None = None


class Chance(Metric):
    """Compares the loss with both guesses. It comes first: in a model at chance level, every other number is moot."""

    keys = ChanceKeys
    kinds = ("chance_level_loss",)
    defect = "chance-level loss"
    file_place, page_place = 5, 0

    def facts(self) -> ChanceKeys:
        vocabulary = self.subject.vocabulary
        return ChanceKeys(
            uniform_loss=math.log(vocabulary), frequency_loss=frequency_loss(self.sample.targets, vocabulary)
        )

    def findings(self, model: Model) -> list[Finding]:
        """Report a loss that is no better than one of the two guesses."""
        if model.uniform_loss is None or model.loss < min(model.uniform_loss, model.frequency_loss):
            return []
        guesses = {
            f"giving every token the same probability ({model.uniform_loss:.4f})": model.uniform_loss,
            f"knowing only token frequencies ({model.frequency_loss:.4f})": model.frequency_loss,
        }
        worse = " or ".join(guess for guess, loss in guesses.items() if model.loss >= loss)
        words = f"the loss of {model.loss:.4f} nats is no better than {worse}"
        return [Finding(kind="chance_level_loss", where={}, words=words)]

    @classmethod
    def absence(cls, model: Model) -> str:
        return "" if model.uniform_loss is None else cls.defect

    @classmethod
    def explain(cls, model: Model, findings: Sequence[Finding]) -> Explained:
        above = model.loss - min(model.uniform_loss, model.frequency_loss)
        return Explained(
            "the whole model",
            sureness(f"{above:.4f} nats above the better baseline", CLEAR if above > NEAR else 1.0, model),
            "Train the model, or check that weights, tokenizer and text match. Until then, all other numbers "
            "describe a model that predicts nothing.",
        )

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        if model.uniform_loss is not None:
            yield Sentence(
                90,
                f"Guessing by token frequencies alone would give a loss of {model.frequency_loss:.4f} nats, "
                f"guessing uniformly {model.uniform_loss:.4f}.",
            )


def frequency_loss(targets: Tensor, vocabulary: int) -> float:
    """Nats per token if each token had its frequency in the rest of the text; this tends to the unigram entropy.

    Each token is left out of its own count: in a short text, its occurrence would give it away. The share of tokens
    that occur once is reserved for unseen tokens (Good and Turing) and divided evenly over the vocabulary.
    """
    counts = torch.bincount(targets.flatten().long()).double()
    counts = counts[counts > 0]
    total = counts.sum()
    unseen = (counts == 1).sum() / total
    probability = (1 - unseen) * (counts - 1) / (total - 1).clamp(min=1) + unseen / vocabulary
    return float(-(counts * probability.log()).sum() / total)
