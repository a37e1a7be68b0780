"""Differential privacy of clients: noisy sums (releases), the ledger of all releases of a run, and their epsilon."""
