"""A model of how long a load takes on machines that we do not have; ``benchmarks/load_model.py`` is the program."""
