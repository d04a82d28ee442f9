"""Matched-budget, multi-seed comparisons: does a depth architecture pay off on this text, per step and per second?

| topic | files |
|---|---|
| configuration and plan | `config`, `plan` |
| running | `run_study` (the whole study), `train_runs`, `worker_pool`, `extend_study` |
| measuring | `records` (of a run), `results_file` (of a study), `measurements`, `timing` |
| statistics | `statistics`, `ladder`, `gains` (decides whether a variant pays off), `collect_results`, `results` |
| report | `verdicts` (puts the decision into words), `tables`, `figures`, `page` |

Where to look for: the runs of a study, `plan.make_plan`; whether a variant pays, `gains.pays`; its colour and marker,
`figures.looks`; the tokens that a verdict is based on, `RunRecord.final_loss` and `StudyResult.validated_tokens`, which
`train/result.py` decides (`final_tokens`).
"""

from residua.study.config import StudyConfig

__all__ = ["StudyConfig"]
