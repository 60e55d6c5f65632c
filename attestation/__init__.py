"""Is this machine what it says it is, and is that acceptable: the lowest floor, usable on its own and offline."""
