"""A model behind requests that come at any time. Framework-free."""
