"""What ``strata doctor`` looks at; read ``finding`` first, then ``network``.

A *finding* is the result of one check: a verdict, what was seen, and the remedy.
"""
