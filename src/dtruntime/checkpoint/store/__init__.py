"""One place with checkpoints: which are committed (`catalog`), who writes (`writer_lock`), what goes
(`cleanup`), what the coordinator is told (`condition_reports`), and places in two `tiers`. Read
`checkpoint_store` first.
"""
