"""Models that leave: ONNX folders which sherpa-onnx runs, and single files to load back."""
