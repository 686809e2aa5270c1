"""Training of drafters: rows, the objective, the trainer on DeepSpeed and Ray Train."""
