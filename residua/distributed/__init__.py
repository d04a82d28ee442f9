"""Training on several devices: replicated (DDP), sharded (FSDP2), pipelined, experts divided, and combinations.

All of it is applied from outside: the model and the trainer do not know how many ranks there are. In reading order:

- `mesh`: starts the process group and arranges the ranks as a grid, pipeline × data × shard.
- `world`: `Ranks`, which the trainer gets instead of `train.world.World` when torchrun starts several processes.
- `step`: the training step on several ranks. It overrides hooks of `train.step.Step`; its docstring gives the order.
- `shard`: builds a rank's share without ever building the whole model; replicates or shards the model over ranks.
- `units`: groups of layers that FSDP2 gathers and `torch.compile` compiles one at a time.
- `experts`: experts on different ranks, and the exchange of tokens between them.
- `optimizer`: Muon on several ranks; each matrix is orthogonalised on one of them.
- `nodes`, `heartbeat`: machines find each other; ranks that die or hang are detected and named.
- `convert`: turns a checkpoint of several ranks into the files of one process.
- `pipeline/`: stages of the model on different ranks: their computation and boundaries (`shares`), the tensors sent
  (`transport`), one stage (`stage`), the part of a rank (`part`), and the step.

`integrations/torchtitan` reuses the code that both engines need: `Part` and its stages, shards, experts, units, Muon's
turns, the common norm of gradients (`step.clip_together`), filling by share, and conversion.
"""
