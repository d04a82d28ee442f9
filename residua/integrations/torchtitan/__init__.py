"""Trains Residua's runs with torchtitan's trainer (docs/torchtitan.md).

    torchrun -m torchtitan.train --module residua.integrations.torchtitan --config PRESET|FILE.toml

torchtitan owns the loop, the mesh, checkpoints, metrics and profiling. Residua brings the parts of its own trainer:
model, data order, loss, Muon, schedule, stages and their cached transport. In reading order:

- `config_registry`: turns a run into torchtitan's configuration; torchtitan requires this module name.
- `refusals`: combinations that Residua and torchtitan do not support together, each refused in one sentence.
- `trainer`: torchtitan's trainer with Residua's text and loss, and one gradient norm over all kinds of parameters.
- `model`: a decoder that returns its losses; its initial weights equal those of `residua train` bit for bit.
- `parallelize`: torchtitan's mesh under our names; recomputation, FSDP2, compilation and pipeline stages.
- `division`: heads or positions on different ranks; `checkpoint`: the files of such ranks.
- `optimizer`: Muon, AdamW and the schedule.
- `convert`: converts torchtitan's checkpoints from and to run folders. It does not need torchtitan.
- `compat`: stand-ins for what torchtitan expects of a newer PyTorch and of an accelerator; runs as text.
"""
