"""Checkpoint throughput: how long saves stall, how fast they are durable, and what loads cost.

`python -m benchmarks.checkpoint_throughput` saves and loads the same states with Strata, torch and
safetensors, beside what the disk, the memory and an S3 server can do at most, in one run.
"""
