"""Proximal policy optimisation on the engine of the trainer."""
