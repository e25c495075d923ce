"""Find, download, check and load model folders."""
