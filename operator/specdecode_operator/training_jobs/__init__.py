"""Training Jobs on the API server: their creation and deletion, and what is read of them."""
