"""Training loops with bookkeeping, as practitioners write them, and the verdict expected for each."""
