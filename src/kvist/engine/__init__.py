"""Requests in, token ids out: policy, batches, sampling and the one loop that commits. Knows ids, never text."""
