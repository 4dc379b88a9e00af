"""Export models: ONNX folders that sherpa-onnx runs, and torch files."""
