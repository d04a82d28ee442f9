"""Residua's runs in torchtitan's trainer (docs/torchtitan.md).

    torchrun -m torchtitan.train --module residua.integrations.torchtitan --config PRESET|FILE.toml

torchtitan owns the loop, the mesh, checkpoints, metrics and profiling. Residua brings what it would train with itself:
model, data order, loss, Muon, schedule, stages and their cached transport. In reading order:

- `config_registry`: turns a run into torchtitan's configuration; torchtitan finds it by this name.
- `refusals`: combinations that the two do not support, each in one sentence.
- `trainer`: torchtitan's trainer with Residua's text and loss, and one gradient norm over all kinds of parameters.
- `model`: a decoder that returns its losses, with the bits that `residua train` starts from on any mesh.
- `parallelize`, `pipeline`: torchtitan's mesh under our names; recomputation, FSDP2, compilation; stages.
- `division`: heads on different ranks, positions on different ranks; `checkpoint`: the files of such ranks.
- `optimizer`: Muon and AdamW, the schedule.
- `convert`: torchtitan's checkpoints from and to run folders. It needs no torchtitan.
- `compat`: what torchtitan expects of a newer PyTorch, and of an accelerator where there is none; runs as text.
"""
