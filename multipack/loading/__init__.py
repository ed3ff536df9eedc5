"""Batches on their way to the trainer: the loader, its threads and processes, devices, frameworks."""
