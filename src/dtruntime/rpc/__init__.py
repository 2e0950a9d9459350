"""The wire, and the only place that knows protobuf. Read ``methods`` first."""
