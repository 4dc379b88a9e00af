"""The losses: functions of tensors, and one module (pruned_transducer.py).

Axes in all files: N batch, T frames, U symbols, S columns kept a frame (the band), E encoder width,
P predictor width, D joiner width, V vocabulary, K durations of TDT, R rows of packed lattices.
"""
