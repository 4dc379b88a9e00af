"""A default that the command line shows without importing torch."""

# Number of checkpoints that `pruned-rnnt average` without --last and decode.checkpoint=average use:
# the default of train.keep_last.
AVERAGED_CHECKPOINTS = 3
