"""Data loading: assignment, throughput and resuming, each beside others in the same run.

`python -m benchmarks.data_loading` deals shards to workers, races Strata's loader against a raw
scan of the same files and against other libraries' loaders, and times how long a loader takes
to find its place in the middle of an epoch.
"""
