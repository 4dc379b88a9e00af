"""Searches: greedy, beam, with durations (TDT), CTC, non-autoregressive, and k2's fast beam."""
