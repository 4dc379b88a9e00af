"""Searches: greedy, beam, with durations (TDT), and CTC."""
