"""Engine process, its client in the server process, and the messages between them."""
