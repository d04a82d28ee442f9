"""Training on several devices: replicated (DDP), sharded (FSDP2), pipelined, experts divided, and combinations.

All of it is applied from outside: the model and the trainer do not know how many ranks there are. In reading order:

- `mesh`: starts the process group and arranges the ranks as a grid, pipeline × data × shard.
- `world`: `Ranks`, which the trainer is given instead of `train.world.World` when torchrun starts several processes.
- `step`: the training step on several ranks. It overrides hooks of `train.step.Step`; its docstring gives the order.
- `construct`: builds the share of a rank, and never the whole model.
- `shard`: makes a model ready for a step, replicated on every rank or sharded over them.
- `units`: groups of layers that FSDP2 gathers, and `torch.compile` compiles, one at a time.
- `experts`: experts on different ranks, and the exchange of tokens between them.
- `optimizer`: Muon on several ranks; each matrix is orthogonalised on one of them.
- `heartbeat`: finds a rank that died or hangs, and names it.
- `convert`: turns the checkpoint of several ranks into the files of one process.
- `pipeline/`: stages of the model on different ranks: where it is divided (`stage_boundary`), what is sent
  (`transport`, `traffic`), one stage (`stage`), parameters that several stages use (`shared_parameters`), and the step.
"""
