"""What a run writes down of itself, in one file: what became of every sample, which decisions were taken, and when.

`verl.journal.file` writes and reads it; `ledger`, `schedule` and `spans` write their events, and `ledger_reader`,
`Script` and `gantt` read them.
"""
