"""``strata bench``: what this machine, disk or bucket gives, and what of that Strata passes on.

Each part measures its limit and Strata in turns, so that both meet the same machine, and every
ratio is of one run.
"""
