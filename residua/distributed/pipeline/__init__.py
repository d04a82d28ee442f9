"""Pipeline parallelism: stages of the model on different ranks, what they send each other, and the schedule."""
