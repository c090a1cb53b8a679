"""A local page over runs: from a curve to the step, its groups, a sample, and each token of it.

``python -m verl.viewer RUN [RUN2 ...]`` reads what runs write down (metrics, samples, journal, configuration), while
they go on and afterwards. It changes nothing in a run's folder.
"""
