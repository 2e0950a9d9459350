"""Who reads which samples of an epoch: ledgers and claims. Read ``ledger`` first."""
