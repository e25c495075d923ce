"""Support for tests of kernels: cases, the interpreter, and programs that compile."""
