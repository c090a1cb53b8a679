"""The kernel's own walls, called directly: namespaces, mounts, Landlock, seccomp. Standard library only."""
