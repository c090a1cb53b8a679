"""One module per tracker; only here are tracker packages imported."""
