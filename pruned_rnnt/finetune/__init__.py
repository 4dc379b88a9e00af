"""Fine-tuning: training that starts from a trained model (`train.init`)."""
