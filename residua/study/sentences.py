"""The sentences around a table, which the terminal, Markdown and HTML pages share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from residua.data.dataset import TINY_VALIDATION
from residua.reading import counted
from residua.study.entries import count
from residua.study.ladder import Law
from residua.study.plan import TIMINGS, PlannedRun, StudyPlan
from residua.study.results import LadderResult, StudyResult
from residua.study.timing import BUSY
from residua.study.verdict import at_size, understated

MISFIT = 0.05  # by how much, in logarithms, a ladder's law may miss the tokens of a budget without a word
LACKED = {"tasks": "Accuracies on tasks", "quantize": "Losses in low precision"}
NAMED = 6  # runs that a sentence names


def validation_sentence(result: StudyResult) -> str:
    """On how many validation tokens losses were measured; empty where that is not known."""
    if result.validated_tokens is None or result.dataset is None:
        return ""
    share = f"{result.validated_tokens:,} of the {result.dataset.validation_tokens:,} validation tokens"
    return f"Losses are measured on {share}.{_sampling(result)}"


def _sampling(result: StudyResult) -> str:
    """That the error from sampling text is not known, if it is not."""
    compared = [row for row in result.rows(result.sizes[-1]) if row.difference is not None]
    if not compared or any(row.text_error is not None for row in compared):
        return ""
    return " The error from sampling this text is not known, since losses by document were not kept."


def text_sentences(result: StudyResult) -> list[str]:
    """What makes the losses themselves doubtful: a tiny validation text, or models worse than token frequencies."""
    said, size = [], result.sizes[-1]
    if result.validated_tokens is not None and result.validated_tokens < TINY_VALIDATION:
        said.append(
            f"The validation text is tiny ({counted(result.validated_tokens, 'token')}), so losses on it are uncertain."
        )
    losses = [row.loss.value for row in result.rows(size) if row.loss is not None]
    if result.dataset is not None and losses and min(losses) > result.dataset.unigram_entropy:
        said.append(
            f"Every model{at_size(size, result)} does worse than predicting by token frequency alone "
            f"({result.dataset.unigram_entropy:.4f} nats per token), so nothing follows from their differences: train "
            "longer."
        )
    return said


def dataset_sentence(result: StudyResult) -> str:
    """The unigram entropy, and by how much even the worst variant of the last size is below it; empty without text."""
    facts, size = result.dataset, result.sizes[-1]
    if facts is None:
        return ""
    losses = [row.loss.value for row in result.rows(size) if row.loss is not None]
    gap = facts.unigram_entropy - max(losses) if losses else 0.0
    below = math.floor(100 * round(gap, 6)) / 100  # 'at least' is never rounded up
    learned = f"; every variant{at_size(size, result)} ends at least {below:.2f} below it" if below > 0 else ""
    return (
        f"Unigram entropy of the validation text: {facts.unigram_entropy:.4f} nats per token "
        f"(the loss of a model that knows only token frequencies){learned}."
    )


def side_by_side_sentence(result: StudyResult) -> str:
    """How speeds were measured: alone, or while runs shared the machine; empty if there was one run at a time."""
    timed = [row for row in result.variants if row.timing is not None]
    if timed:
        devices = ", ".join(sorted({row.timing.device for row in timed if row.timing is not None}))
        rest = [row.name for row in result.variants if row.timing is None and row.throughput_ratio is not None]
        but = f", but that of {', '.join(dict.fromkeys(rest))}, which is from training (--time-alone)" if rest else ""
        alone = f"Speeds are those of each variant's step timed alone, after its runs ({devices}){but}."
        return " ".join(said for said in (alone, _busy_sentence(result)) if said)
    if result.side_by_side < 2:
        return ""
    return (
        f"{result.side_by_side} runs shared this machine, so they slowed each other down: measure speeds and "
        "wall-clock gains with --time-alone before relying on them."
    )


def _busy_sentence(result: StudyResult) -> str:
    """Whose steps were timed while the machine was busy; empty if none."""
    several = len(result.sizes) > 1
    who = [
        f"{row.name}{f' ({row.size})' if several else ''}"
        for row in result.variants
        if row.timing is not None and row.timing.busy
    ]
    if not who:
        return ""
    return (
        f"The steps of {', '.join(who)} were timed while the machine was busy (they spread by more than {BUSY:.0%}), "
        f"so no gain per second follows from them: remove {TIMINGS}/ and run the study again when it is idle."
    )


def ladder_sentences(result: StudyResult) -> list[str]:
    """What to know about gains per token: that there is no ladder, or that its law misses the baseline's own losses."""
    if any(understated(row, result) for row in result.rows(result.sizes[-1])):
        return [
            "Gains per second are from step-wise gains, on one schedule's curve: they understate what a lower loss is "
            "worth. Use --ladder before concluding that a variant does not pay."
        ]
    return [said for ladder in result.ladder if (said := _misfit(ladder, result))]


def _misfit(ladder: LadderResult, result: StudyResult) -> str:
    """Empty if the law gives each budget its own tokens back, but for MISFIT."""
    if ladder.law is None:
        return ""
    law = Law(**ladder.law.model_dump())
    worths = [(law.tokens(rung.loss.value) / rung.tokens, rung.tokens) for rung in ladder.rungs]
    worth, tokens = max(worths, key=lambda pair: abs(math.log(pair[0])))
    if abs(math.log(worth)) <= MISFIT:
        return ""
    return (
        f"The law of the ladder{at_size(ladder.size, result)} misses the losses of "
        f"{result.baseline}: its run of {count(tokens)} tokens would be worth {worth:.2f}× its own tokens. Equivalent "
        "tokens are off by as much; runs that are too short do not follow the law."
    )


def cost_sentences(plan: StudyPlan) -> list[str]:
    """What a search of learning rates and a ladder cost, and whether the ladder repeats text."""
    own, trials = _new_tokens(plan.compared), _new_tokens(plan.trials)
    ladder = _new_tokens(plan.runs) - own
    said = []
    for what, added in (("Tuning", trials), ("The ladder", ladder)):
        if added:
            share = f"({added / own:+.0%})"
            said.append(f"{what} adds {count(added)} training tokens to the {count(own)} of the comparison {share}.")
    largest = max(_tokens(run) for run in plan.runs)
    if plan.ladder and largest > plan.text_tokens:
        said.append(
            f"The largest budget reads the text {largest / plan.text_tokens:.1f} times. Repeated text teaches less "
            "than new text, which favours the variants."
        )
    return said


def _tokens(run: PlannedRun) -> int:
    return run.config.train.steps * run.config.tokens_per_step


def _new_tokens(runs: Sequence[PlannedRun]) -> int:
    """Training tokens of these runs, those that a run shares with the longest of its family counted once."""
    longest: dict[object, int] = {}
    for run in runs:
        longest[run.family] = max(longest.get(run.family, 0), run.config.train.steps)
    return sum(_tokens(run) if run.config.train.steps == longest[run.family] else _own_tokens(run) for run in runs)


def _own_tokens(run: PlannedRun) -> int:
    """The training tokens of a run after it has branched off a longer one."""
    recipe = run.config.train
    return (recipe.steps - recipe.schedule.shared_steps(recipe.steps)) * run.config.tokens_per_step


def matching_sentences(result: StudyResult) -> list[str]:
    """What parameter matching changed, one sentence per variant."""
    several = len(result.sizes) > 1
    return [
        f"{row.name}{f' ({row.size})' if several else ''}: {row.matching} to match the baseline's parameters "
        f"({row.parameters_ratio - 1:+.2%})."
        for row in result.variants
        if row.matching
    ]


def lacking_sentences(result: StudyResult) -> list[str]:
    """Which runs were not measured as others were, and how to do it."""
    told = []
    for option, runs in result.lacking.items():
        more = f" and {len(runs) - NAMED} more" if len(runs) > NAMED else ""
        told.append(
            f"{LACKED[option]} are not complete for {', '.join(runs[:NAMED])}{more}: "
            f"--{option} measures them where their weights are."
        )
    return told


def unequal_seeds(result: StudyResult) -> str:
    """Which variants lack seeds that others have, as in "mgr: 2 of 3 seeds"; empty if all have the same."""
    told = []
    for size in result.sizes:
        done = {row.name: {run.seed for run in result.complete(size, row.name)} for row in result.rows(size)}
        if len(set(map(frozenset, done.values()))) == 1:
            continue
        lacking: dict[int, list[str]] = {}
        for name, seeds in done.items():
            if len(seeds) < len(result.seeds):
                lacking.setdefault(len(seeds), []).append(name)
        at = at_size(size, result)
        for seen, names in sorted(lacking.items(), reverse=True):
            who = ", ".join(names) if len(names) <= NAMED else f"{len(names)} variants"
            told.append(f"{who}{at}: {seen} of {counted(len(result.seeds), 'seed')}")
    return "; ".join(told)


def seeds_sentence(result: StudyResult) -> str:
    """Which variants lack seeds, and which seeds a difference is of then; empty if all have the same."""
    unequal = unequal_seeds(result)
    if not unequal:
        return ""
    return f"Seeds differ ({unequal}): Δ loss is over those that a variant shares with {result.baseline}."
