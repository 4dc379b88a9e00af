"""The results in the folder of a run: how they are named, written and read.

RUN/results/
    recogs-, errs-, wer-summary-STEM.txt    in icefall's format
    nbest-STEM.jsonl                        hypotheses with scores and times
    scores-STEM.json                        error rates, and the inputs of the computation
    scores.json                             all of these files as one list
    plots/STEM.png                          pictures, with an utterance for SET
RUN/alignments/STEM/                        files of `align`, and SET-inputs.json

STEM is SET-LABEL-CHECKPOINT-FINGERPRINT: see `ResultInputs`.
"""
