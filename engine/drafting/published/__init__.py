"""Heads as their authors publish them: folders, what they have to hold, and the networks inside."""
