"""``strata bench``: how fast this machine, disk or bucket is, and how much of that Strata delivers.

Each part (``checkpoint_throughput``, ``coordinator_throughput``, ``loader_throughput``) measures
its *limit* and Strata in turns, round after round, so that both see the same machine and every
ratio is of one run. Read ``report`` first: a *series* collects the turns of one measure, a
*section* the measures of one part. ``raw_storage`` is a disk or a bucket without Strata.

The repository's ``benchmarks/`` measures with the same parts, and adds other libraries.
"""
