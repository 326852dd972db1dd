"""The decoder, and everything between a name or a path and a loaded one."""
