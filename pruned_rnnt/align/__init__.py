"""Forced alignment: the time at which a model emits each symbol and word of a known text.

| task | module |
| --- | --- |
| best path in the lattice of the model's joiner | `best_path.py` |
| batches to utterances with the times of their words | `utterance.py` |
| a prepared set, or one audio file with its text | `sources.py` |
| write TextGrid, CTM or a lhotse manifest | `output.py` |
| `pruned-rnnt align` | `align_command.py` |
| picture of an utterance | `picture.py` |

Times of tokens and words, and CTM lines, come from `pruned_rnnt/decode`: `word_times.py`, `ctm.py`.
"""
