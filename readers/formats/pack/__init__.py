"""The native pack: Arrow IPC files that are mapped and read without a copy."""
