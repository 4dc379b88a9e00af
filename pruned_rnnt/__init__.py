"""Pruned RNN-T: transducer losses and training for PyTorch."""
