"""The losses: functions of tensors, and one module (pruned_transducer.py)."""
