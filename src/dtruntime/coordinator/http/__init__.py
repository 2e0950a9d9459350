"""HTTP API, event stream, metrics and dashboard of a coordinator. Read ``routes`` first."""
