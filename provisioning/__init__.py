"""Who may open the weights, and how they are sealed and opened: the middle floor. No torch, no sockets."""
