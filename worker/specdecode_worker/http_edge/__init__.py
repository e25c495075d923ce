"""Parts that the HTTP servers of workers and routers share: bounds of bodies, and certificates."""
