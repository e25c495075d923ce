"""Parts of the server process that notice a failure of the engine or of the server, and end the process in time."""
