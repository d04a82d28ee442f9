"""Pipeline parallelism: stages of the model on different ranks, the tensors between them, and the schedule."""
