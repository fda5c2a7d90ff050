"""The engine in a process of its own: launch and watch it, and speak with it over pipes."""
