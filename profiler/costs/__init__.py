"""What kernels cost: their calls, their work, and how long a GPU takes for them."""
