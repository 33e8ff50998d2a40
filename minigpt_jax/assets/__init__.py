"""Files shipped with the package: the tokenizer and the command that made it."""
