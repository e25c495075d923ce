"""Access control: API keys, admin tokens with scopes, checks against foreign web pages, and cache salts."""
