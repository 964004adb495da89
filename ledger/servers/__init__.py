"""The servers behind a ledger url: one, those that Sentinels watch, or those of a cluster."""
