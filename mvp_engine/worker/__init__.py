"""Worker groups: model engines in other processes, driven by one controller; one API for local, spawn and Ray."""
