"""Figure scenes: a second kind of scene. It runs no engine step by step; it is computed at once, checked like the others, and drawn as a figure."""
