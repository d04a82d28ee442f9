"""Training on several devices: data parallel, fully sharded, pipelined, and their products.

All of it is applied from outside the model, by torch.distributed: DDP, FSDP2, pipelining and distributed checkpoints.
"""
