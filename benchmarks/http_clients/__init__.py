"""How much people who watch a coordinator over HTTP slow down its workers' heartbeats.

`python -m benchmarks.http_clients` measures heartbeats with 0, 50 and 200 streams of events open.
"""
