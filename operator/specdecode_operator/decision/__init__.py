"""The pure decision about one deployment, in stages."""
