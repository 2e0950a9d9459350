"""``strata bench``: what this machine, disk or bucket gives, and what of that Strata passes on.

Each part (``checkpoint_throughput``, ``coordinator_throughput``, ``loader_throughput``) measures
its *limit* and Strata in turns, round after round, so that both meet the same machine, and every
ratio is of one run. Read ``report`` first: a *series* collects the turns of one measure, a
*section* the measures of one part. ``raw_storage`` is a disk or a bucket without Strata.
"""
