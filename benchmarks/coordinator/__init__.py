"""The coordinator under load generators that are not ours.

`python -m benchmarks.coordinator` starts the coordinator and two bare echo servers on one
core, loads them from another with h2load, checks the replies with k6, and reports ratios of
numbers measured in the same run.
"""
