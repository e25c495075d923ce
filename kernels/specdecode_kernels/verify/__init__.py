"""Which path of a drafted tree the target accepts, and what it emits behind it."""
