"""What runs inside the sandbox's processes: the keeper, the first process of each sandbox, and the program's own.

    caller ── starts ──> watcher ── starts ──> keeper          one each for a pool; only the keeper lives in the walls
                                               └─ forks ──> init       one for each run: first of its own pid namespace
                                                            └─ forks ──> program   one for each case

The watcher dies with the caller and takes the keeper along; the keeper's death is the end of its pid namespace, and so
of everything in it. Init holds the only way out (a socket to the caller) and cannot be signalled or looked into by the
program, which has pipes and nothing else. Standard library only: these files are imported by an interpreter that sees
nothing but them and the standard library.
"""
