"""The protocol between clients and the coordinator. Read ``methods`` first: the calls.

``gen`` has the protobuf messages, ``decode`` and ``encode`` turn them into commands and replies
of the coordinator's machine, ``messages`` into the types of clients. ``channel`` makes calls.
"""
