"""Forced alignment: where in its audio each symbol and word of a known text was emitted.

| what | where |
| --- | --- |
| best path in the lattice of the model's joiner | `lattice.py` |
| symbols to tokens and words with times | `word_times.py` |
| TextGrid, CTM, lhotse manifest | `textgrid.py`, `ctm.py`, `manifest.py` |
| a prepared set or one file, batch by batch | `run.py` |
| picture of an utterance | `picture.py` |
"""
