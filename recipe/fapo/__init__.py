"""FAPO: a right answer whose reasoning has an error, as a generative reward model finds it, is paid less."""
