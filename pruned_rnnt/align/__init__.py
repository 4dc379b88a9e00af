"""Forced alignment: the time at which a model emits each symbol and word of a known text.

| task | module |
| --- | --- |
| best path in the lattice of the model's joiner | `best_path.py` |
| a prepared set, or one audio file with its text, to utterances with times | `utterance.py` |
| write TextGrid, CTM or a lhotse manifest, and their folder | `output.py` |
| `pruned-rnnt align` | `align_command.py` |
| picture of an utterance | `picture.py` |
| calibration of word times and confidences | `calibrate.py` |

Times of tokens and words, and CTM lines, come from `pruned_rnnt/decode/word_times.py`.
"""
