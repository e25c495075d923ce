"""GPU and CPU operations of the worker: a plain PyTorch reference each and, where it pays off, a Triton kernel."""
