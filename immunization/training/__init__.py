"""What a training is made of: batches, optimizers, checkpoints."""
