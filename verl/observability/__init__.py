"""What a person sees of a run: metrics in trackers, sampled completions, dumps and plots.

Nothing here is imported before it is used: `verl.observability.tracking`, `.samples`, `.plots`.
"""
