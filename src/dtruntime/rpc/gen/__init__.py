"""Message classes generated from `proto/` by `make proto`; not to be edited."""
