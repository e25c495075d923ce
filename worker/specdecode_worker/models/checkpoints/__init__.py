"""Location, download, checks and loading of model folders."""
