"""What opens a bundle on a device: its halves measured apart, and a load on a GPU."""
