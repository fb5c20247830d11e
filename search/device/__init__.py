"""What one device runs under a plan: its kernels, their order, their time and the memory that they hold."""
