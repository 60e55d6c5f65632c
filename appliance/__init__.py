"""The running machine: agent, loader, engine, API, and the way everything is forgotten."""

__version__ = "0.1.0"
