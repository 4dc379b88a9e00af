"""Measures whole training steps of one or more versions of pruned_rnnt; see __main__.py."""
