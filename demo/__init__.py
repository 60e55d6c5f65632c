"""The main job on a real model, for a stranger to run: ``make demo``."""
