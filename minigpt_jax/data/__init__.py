"""Records, the token cache, batches and the sample corpus. Framework-free."""
