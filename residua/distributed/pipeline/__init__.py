"""Pipeline parallelism: where a model is cut, what crosses, and the schedule that drives the stages."""
