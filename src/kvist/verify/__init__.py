"""Proof that cached output equals recomputed output: comparisons and tolerances, independent judges, the laws."""
